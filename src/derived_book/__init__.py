"""The tools of the book *Derived Attention*: claims, exercises, figures, tasks and training.

Every public name can be imported from here, and its module is loaded when the name is first used:
``from derived_book import claims, fit, show``. The attention mechanisms themselves are in
`derived_attention`, which imports nothing of this package.
"""

import importlib
from collections.abc import Mapping
from typing import Any

# The public names of each module.
_MODULES = {
    "claims": "claims",
    "experiment_tables": "detectable plot_curves results_table tuning_table",
    "exercises": "Once check check_properties largest_tensor",
    "intervals": "decided",
    "plot": "COLORS LABELS fade show use_style",
    "sliders": "Bars Heat Line Panel Points slider",
    "svr": "fit_svr gram_features",
    "runtime": "seed_everything start",
    "tasks.detection.data": "make_scenes",
    "tasks.detection.loss": "SceneBatches average_precision detect detection_loss",
    "tasks.detection.model": "DetectionTransformer",
    "tasks.detection.run": "train_detection",
    "tasks.images.data": "load_images",
    "tasks.images.model": "VisionTransformer",
    "tasks.images.run": "train_images",
    "tasks.language.data": "encode load_text",
    "tasks.language.documents": "load_documents",
    "tasks.language.loss": "Windows byte_loss generate",
    "tasks.language.model": "ByteLM LanguageModel",
    "tasks.language.sessions": "Sessions draw_sessions right_answers",
    "tasks.language.run": "load_language_model small_model",
    "tasks.listops.data": "make_listops prefix_rule",
    "tasks.model": "Config PreNormLayer make_attention",
    "tasks.recall.loss": "Questions answer_loss",
    "tasks.run": "attention_cost",
    "tasks.series.data": "SeriesSplit load_series",
    "tasks.series.model": "SeriesClassifier",
    "tasks.series.run": "train_series",
    "tasks.supervised": "Examples class_loss",
    "training.fit": "evaluate fit",
    "training.grids": "run_grid summarise",
    "training.measure": "measure",
    "training.recorded": "curves load_experiment scores",
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}


def places() -> Mapping[str, str]:
    """Return the module of each public name."""
    return {name: f"{__name__}.{module}" for name, module in _PLACES.items()}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_PLACES[name]}")
    return getattr(module, name, module)  # `claims` and `measure` are modules


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
