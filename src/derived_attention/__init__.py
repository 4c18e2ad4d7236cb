"""Derived Attention: attention mechanisms derived from five fields, made fast and tested.

Every mechanism and layer can be imported from here by its name, and so can what pages use beside
them; each is loaded when it is asked for: ``from derived_attention import mixture_attention, fit``.
`list_attentions` names the mechanisms, and `get_attention` returns one by its name.
"""

import importlib
from collections.abc import Mapping
from typing import Any

__version__ = "0.1.0"
# Where the public names are that belong to no mechanism: `attention.registry` has those that do.
_MODULES = {
    "attention.contract": "check_mechanism",
    "attention.registry": "get_attention list_attentions MECHANISMS",
    "attention.splitting.admm": "admm printed_admm",
    "page": "claims",
    "page.decided": "detectable plot_curves results_table",
    "page.exercises": "Once check check_properties largest_tensor",
    "page.plot": "COLORS LABELS fade show use_style",
    "page.sliders": "Bars Heat Line Panel Points slider",
    "page.svr": "fit_svr gram_features",
    "runtime": "seed_everything start",
    "tasks.control.data": "load_control",
    "tasks.control.loss": "Trajectories action_loss rollout",
    "tasks.control.model": "DecisionTransformer",
    "tasks.control.run": "train_control",
    "tasks.detection.data": "load_coco make_scenes",
    "tasks.detection.loss": "SceneBatches average_precision detect detection_loss",
    "tasks.detection.model": "DetectionTransformer",
    "tasks.detection.run": "train_detection",
    "tasks.images.data": "load_images",
    "tasks.images.model": "VisionTransformer",
    "tasks.images.run": "train_images",
    "tasks.language.data": "encode load_text ngram_bits",
    "tasks.language.loss": "Windows byte_loss generate",
    "tasks.language.model": "ByteLM",
    "tasks.language.sessions": "Sessions draw_sessions right_answers session_bits",
    "tasks.language.run": "small_model",
    "tasks.listops.data": "LRA SHORT make_listops prefix_rule",
    "tasks.model": "Config PreNormLayer TokenClassifier make_attention",
    "tasks.recall.data": "draw_recall",
    "tasks.recall.loss": "Questions answer_loss",
    "tasks.recall.model": "Recaller",
    "tasks.recall.run": "train_recall",
    "tasks.run": "attention_cost",
    "tasks.series.data": "SeriesSplit load_series",
    "tasks.series.model": "SeriesClassifier SeriesRegressor",
    "tasks.series.run": "train_series",
    "tasks.supervised": "Examples class_loss number_loss",
    "training": "measure",
    "training.fit": "evaluate fit",
    "training.grids": "run_grid summarise",
    "training.recorded": "curves load_experiment scores",
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}


def places() -> Mapping[str, str]:
    """Return the module of each public name. This imports PyTorch."""
    registry = importlib.import_module(f"{__name__}.attention.registry")
    return {name: f"{__name__}.{module}" for name, module in _PLACES.items()} | registry.PUBLIC


def __getattr__(name: str) -> Any:
    if name.startswith("_"):  # not a name of ours, and the registry takes a second to import
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_PLACES[name]}" if name in _PLACES else places().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = importlib.import_module(module)
    return getattr(package, name, None) or importlib.import_module(f"{module}.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *places()])
