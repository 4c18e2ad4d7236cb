"""Measure other libraries: each peer in the same rounds as our form and SDPA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import run
from benchmarks.cases import BASELINES
from benchmarks.peers import Peer, load
from benchmarks.report import SCHEMA, Files, caption, peer_table
from derived_book.experiment_tables import markdown
from derived_book.training.measure import peak_bytes

LENGTHS = [512, 1024, 2048, 4096]


def calls_of(
    baseline: str, peers: Mapping[str, Peer], length: int, dim: int, tensors: list[Tensor]
) -> dict[str, run.Call]:
    """Return the calls to time at one length, by name: the baseline, our forms and the peers."""
    beside = BASELINES[baseline]
    calls = {baseline: run.call(beside.fast, tensors, beside.options(length, dim))}
    for name, peer in peers.items():
        given = tokens_first(tensors) if peer.tokens_first else tensors
        own = peer.ours.options(length, dim)
        calls[ours(peer)] = run.call(peer.ours.fast, tensors, own)
        theirs = (peer.options or peer.ours.options)(length, dim)
        calls[name] = run.call(peer.form, given, theirs)
    return calls


def ours(peer: Peer) -> str:
    """Return a name for our form, which is timed once even if it has several peers."""
    return f"ours: {peer.ours.label}"


def tokens_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the same (B, H, N, D) tensors, but with N before H in memory."""
    return [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(x.requires_grad)
        for x in tensors
    ]


def compare(
    baseline: str,
    peers: Mapping[str, Peer],
    point: tuple[int, int, torch.dtype, str],
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Measure time and memory of peers at one D, N, dtype and mode; return a row for each."""
    dim, length, dtype, mode = point
    peers = {name: peer for name, peer in peers.items() if lengths_of(peer, [length])}
    tensors = run.inputs(length, dtype, mode != run.MODES[0], dim)
    calls = calls_of(baseline, peers, length, dim, tensors)
    taken = run.time_rounds(calls, rounds)
    sizes = {name: peak_bytes(fn, device="cpu") for name, fn in calls.items()}
    return {
        name: {
            "length": length,
            "dim": dim,
            "dtype": run.dtype_name(dtype),
            "mode": mode,
            "seconds": run.quartiles(taken[name]),
            "ours_seconds": run.quartiles(taken[ours(peer)]),
            "baseline_seconds": run.quartiles(taken[baseline]),
            "ratio": run.quartiles(taken[name] / taken[ours(peer)]),
            "ours_ratio": run.quartiles(taken[ours(peer)] / taken[baseline]),
            "bytes": sizes[name],
            "ours_bytes": sizes[ours(peer)],
            "baseline_bytes": sizes[baseline],
        }
        for name, peer in peers.items()
    }


def lengths_of(peer: Peer, lengths: Sequence[int]) -> list[int]:
    """Return the lengths at which a peer is measured."""
    return [n for n in lengths if peer.longest is None or n <= peer.longest]


def settings(peer: Peer, lengths: Sequence[int], dims: Sequence[int]) -> Any:
    """Return the settings that determine the numbers of a peer, for JSON."""
    return run.settings(peer.ours, lengths_of(peer, lengths), dims)


def title(peer: Peer) -> dict[str, str]:
    """Return the entries of a results file that can change without a new measurement."""
    beside = BASELINES[peer.ours.baseline].label
    return {
        "label": peer.label,
        "package": peer.package,
        "ours": peer.ours.label,
        "beside": beside,
        "differs": peer.differs,
    }


def measure(
    peers: Mapping[str, Peer],
    lengths: Sequence[int],
    dims: Sequence[int],
    rounds: int,
) -> Files:
    """Measure peers of one baseline; return the contents of the results file of each."""
    (baseline,) = {peer.ours.baseline for peer in peers.values()}
    times: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    for point in run.points(dims, lengths):
        dim, length, dtype, mode = point
        where = f"N = {length}, D = {dim}, {run.dtype_name(dtype)}, {mode}"
        run.progress(f"peers: {', '.join(peers)}; {where}")
        for name, row in compare(baseline, peers, point, rounds).items():
            times[name].append(row)
    return {
        name: {
            "schema": SCHEMA,
            **title(peer),
            "version": run.version_of(peer.package),
            "device": "cpu",
            "machine": run.processor(),
            "commit": run.commit(),
            "code": run.code(peer.ours),
            "settings": settings(peer, lengths, dims),
            "rounds": rounds,
            "times": times[name],
        }
        for name, peer in peers.items()
    }


def main(
    libraries: Sequence[str],
    lengths: Sequence[int] | None,
    dims: Sequence[int],
    rounds: int,
    folder: Path | None,
    again: bool,
) -> Files:
    """Measure the peers of libraries, and print their table.

    If there is a `folder`, results are written into ``folder/peers``, and peers whose results are
    up to date are skipped, unless `again` is True.
    """
    lengths = sorted(set(lengths or LENGTHS))
    peers, missing = load(libraries)
    peers = {name: peer for name, peer in peers.items() if lengths_of(peer, lengths)}
    for line in missing:
        run.progress(line)
    if folder is not None and not again:
        peers = {
            name: peer
            for name, peer in peers.items()
            if run.must_measure(
                folder / "peers" / f"{name}.json",
                settings(peer, lengths, dims),
                run.code(peer.ours),
            )
        }
    done: Files = {}
    for baseline in dict.fromkeys(peer.ours.baseline for peer in peers.values()):
        group = {name: peer for name, peer in peers.items() if peer.ours.baseline == baseline}
        measured = measure(group, lengths, dims, rounds)
        done |= measured
        for name, data in measured.items() if folder is not None else ():
            run.save(folder / "peers" / f"{name}.json", data)
    if done:
        print(f"\nOther libraries, as multiples of ours: {caption(done)}.\n")
        for dim in dims:
            print(markdown(peer_table(done, max(lengths), dim)))
    return done
