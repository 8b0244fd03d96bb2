"""XLA's flags for the tests' own process, which compiles much and computes little: what is ready soonest.

Processes of runs keep the code generator that a user's run has.
"""

from importlib.metadata import version

QUICK_TO_COMPILE = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if version("jaxlib").startswith("0.10."):
    # Its older code generator compiles these programs in a third of the time. Later releases have only the newer one.
    QUICK_TO_COMPILE.append("--xla_cpu_use_fusion_emitters=false")
