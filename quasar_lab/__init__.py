"""quasar-lab: learn, explore and measure quantised verification for speculative decoding.

The modules follow a token on its way: get a model (`loading`), watch it (`calibration`), smooth
it (`smoothing`), quantise it (`quantization`), multiply (`int8_gemm`), run it (`targets`), draft
(`drafting`), verify (`sampling`, `decoding`), compare (`fidelity`) and measure (`tasks`,
`benchmark`).

The public names are imported on first use, so that `import quasar_lab` and `quasar-lab --help`
do not wait for torch.
"""

import importlib

_HOME = {
    "UserError": "errors",
    "LanguageModel": "loading",
    "load": "loading",
    "ActivationStats": "calibration",
    "CalibrationStats": "calibration",
    "calibrate": "calibration",
    "m2_scale": "smoothing",
    "smoothquant_scale": "smoothing",
    "QuantizationConfig": "quantization",
    "W8A8Linear": "quantization",
    "quantize": "quantization",
    "available_backends": "int8_gemm",
    "int8_matmul": "int8_gemm",
    "quantize_activation": "int8_gemm",
    "quantize_weight": "int8_gemm",
    "w8a8_linear": "int8_gemm",
    "Target": "targets",
    "HuggingFaceTarget": "targets",
    "FastDecoder": "decoder",
    "Draft": "drafting",
    "Drafter": "drafting",
    "NGramDrafter": "drafting",
    "SuffixDrafter": "drafting",
    "LayerSkipDrafter": "drafting",
    "ModelDrafter": "drafting",
    "AdaptiveDrafter": "drafting",
    "SamplingConfig": "sampling",
    "probabilities": "sampling",
    "verify": "sampling",
    "Generation": "decoding",
    "generate": "decoding",
    "Trace": "trace",
    "reprice": "repricing",
    "compare_logits": "fidelity",
    "prune_layers": "pruning",
    "prune_width": "pruning_width",
    "Prompt": "tasks",
    "load_task": "tasks",
    "load_calibration_texts": "tasks",
    "conversation": "tasks",
    "load_hub_task": "hub_tasks",
    "run_benchmark": "benchmark",
    "run_experiment": "experiment",
    "compare_accuracy": "accuracy",
    "export_compressed_tensors": "export",
    "load_compressed_tensors": "import_checkpoint",
    "vllm_command": "serving",
    "Endpoint": "endpoint",
    "run_endpoint_benchmark": "endpoint_benchmark",
}

__version__ = "0.1.0"
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'quasar_lab' has no attribute {name!r}")
    return getattr(importlib.import_module(f"quasar_lab.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
