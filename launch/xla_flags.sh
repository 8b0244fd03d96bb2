# Sourced by the launchers (or by hand): XLA flags for training on NVIDIA GPUs over several processes. XLA ends a process
# whose flags it does not know; every one here is known to jaxlib 0.10.2 and 0.12, and none changes what is computed.
# A flag that XLA_FLAGS sets already stays as it is.
noloco_xla_flags=(
    # Collectives run beside computation: the scheduler hides their latency, as profiled or estimated.
    --xla_gpu_enable_latency_hiding_scheduler=true
    # Small all-gathers and reduce-scatters of one layer (fsdp) go out as one message.
    --xla_gpu_all_gather_combine_threshold_bytes=134217728
    --xla_gpu_reduce_scatter_combine_threshold_bytes=134217728
    --xla_gpu_all_reduce_combine_threshold_bytes=134217728
)
for flag in "${noloco_xla_flags[@]}"; do
    case " ${XLA_FLAGS:-} " in
        *" ${flag%%=*}="*) ;;
        *) export XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }$flag" ;;
    esac
done
unset flag noloco_xla_flags
