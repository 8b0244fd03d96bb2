"""XLA's flags for tests, which compile much and compute little: code of the least optimisation is ready soonest."""

from importlib.metadata import version

QUICK_TO_COMPILE = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if version("jaxlib").startswith("0.10."):
    # Its older code generator compiles these programs in a third of the time. Later releases have only the newer one.
    QUICK_TO_COMPILE.append("--xla_cpu_use_fusion_emitters=false")
