# Sourced by the launchers: XLA flags for training on several NVIDIA GPUs. jaxlib 0.10.2 and 0.12 accept all of them (XLA
# aborts on unknown flags), and none changes results. Flags that XLA_FLAGS already sets stay as they are.
noloco_xla_flags=(
    # Overlap collectives with computation.
    --xla_gpu_enable_latency_hiding_scheduler=true
    # Combine the small all-gathers and reduce-scatters of a layer (fsdp).
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
