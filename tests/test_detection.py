"""Detection: the scenes, the model, the loss, and average precision."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from helpers import assert_named
from kinds import detector, scenes, writer
from torch import nn

from derived_attention import PrimalAttention, linear_attention, softmax_attention
from derived_attention.layer import MultiheadAttention
from derived_book.runtime import digest
from derived_book.tasks.detection import data
from derived_book.tasks.detection.data import SHAPES, Scenes, make_scenes
from derived_book.tasks.detection.loss import (
    Detections,
    SceneBatches,
    average_precision,
    box_giou,
    detect,
    detection_loss,
    match,
)
from derived_book.tasks.detection.model import DetectionTransformer, grid_positions
from derived_book.tasks.model import Config
from derived_book.training.fit import evaluate, fit

PLACES = ("encoder", "decoder", "cross")


# --- Drawn scenes ---------------------------------------------------------------------------------


def test_a_seed_decides_the_scenes():
    first = make_scenes(70, 3)
    assert digest(first) == digest(make_scenes(70, 3)) != digest(make_scenes(70, 4))
    assert first.images.shape == (70, 3, 48, 48) and first.images.dtype == torch.float32
    assert 0 <= first.images.min() and first.images.max() <= 1
    some = first[10:20]
    assert len(some) == 10 and torch.equal(some.images, first.images[10:20])
    assert some.names == first.names and torch.equal(some.counts, first.counts[10:20])


def test_all_classes_and_counts_are_about_as_frequent():
    found = make_scenes(2000, objects=4)
    assert found.classes == len(SHAPES) and found.boxes.shape == (2000, 4, 4)
    numbers = torch.bincount(found.counts, minlength=5)
    assert numbers[0] == 0 and (numbers[1:] - 500).abs().max() < 80
    classes = torch.bincount(found.labels[found.labels >= 0]) / found.counts.sum()
    assert len(classes) == 5 and (classes - 0.2).abs().max() < 0.03
    real = found.labels >= 0
    assert (real.int().diff(dim=1) <= 0).all()  # missing objects come last
    assert (found.boxes[~real] == 0).all()


def drawn(shape, width, height, size=32, corner=(4, 7)):
    """The pixels of one shape."""
    box = np.array([[*corner, width, height]])
    u, v = data._own_coordinates(box, size)
    return data._inside(shape, u[:, None], v[:, :, None], box[:, 2])[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_reaches_all_sides_of_its_box_and_goes_no_further(shape):
    for width, height in itertools.product((9, 10, 17, 22), repeat=2):
        rows, columns = np.nonzero(drawn(shape, width, height))
        assert (columns.min(), columns.max()) == (4, 3 + width), (width, height)
        assert (rows.min(), rows.max()) == (7, 6 + height), (width, height)


def test_shapes_cover_what_they_should():
    share = {shape: drawn(shape, 24, 20).sum() / 480 for shape in SHAPES}
    expected = dict(disc=np.pi / 4, rectangle=1, triangle=0.5, cross=0.64, ring=0.75 * np.pi / 4)
    assert share == pytest.approx(expected, abs=0.05)


def test_objects_are_where_their_boxes_say():
    """Inside a rectangle's box there is one colour, and noise; around it there is another."""
    found = make_scenes(400, objects=1)
    assert (found.labels >= 0).all()
    low = (48 * (found.boxes[:, 0, :2] - found.boxes[:, 0, 2:] / 2)).round().long()
    high = (48 * (found.boxes[:, 0, :2] + found.boxes[:, 0, 2:] / 2)).round().long()
    assert low.min() == 0 and high.max() == 48
    for i in (found.labels[:, 0] == SHAPES.index("rectangle")).nonzero()[:, 0].tolist():
        (x, y), (right, bottom) = low[i].tolist(), high[i].tolist()
        inside = found.images[i, :, y:bottom, x:right]
        mean = inside.mean((1, 2))
        assert inside.std((1, 2)).max() < 0.12
        bright = (mean > 0.5).float()
        assert ((mean - bright).abs() < 0.35).all()
        for row, column in ((y - 1, slice(x, right)), (bottom, slice(x, right))):
            if 0 <= row < 48:
                outside = found.images[i, :, row, column].mean(1)
                assert (outside - mean).abs().max() > 0.05


def test_few_objects_overlap():
    found = make_scenes(1000)
    boxes = (48 * found.boxes).double().numpy()
    boxes[..., :2] -= boxes[..., 2:] / 2
    worst = np.zeros(1000)
    for j, k in itertools.combinations(range(3), 2):
        both = (found.labels[:, [j, k]] >= 0).all(1).numpy()
        shared = np.zeros(1000)
        shared[both] = data._shared_area(boxes[both, j], boxes[both, k])
        worst = np.maximum(worst, shared)
    assert 0.1 < (worst > 0).mean() < 0.6 and (worst > data.OVERLAP + 1e-6).mean() < 0.03


def test_wrong_scenes():
    bad = [
        (ValueError, "n is 0; expected a whole number, at least 1", dict(n=0)),
        (ValueError, "size is 15; expected a whole number, at least 16", dict(size=15)),
        (TypeError, "objects is of type float; expected a whole number", dict(objects=1.0)),
        (ValueError, "seed is -1", dict(seed=-1)),
    ]
    assert_named(bad, make_scenes, n=2)
    good = scenes()
    for field, wrong, message in (
        ("images", good.images[:, :2], r"is .*\(n, 3, height, width\)"),
        ("boxes", good.boxes[:5], r"is .* \(5, 2, 4\); expected floats of shape \(24"),
        ("sizes", good.sizes[:, 0], r"is .* \(24,\); expected int64 of shape \(24, 2"),
        ("labels", good.labels + 1, "holds 0 to 2; expected classes -1 <= x < 2"),
    ):
        with pytest.raises(ValueError, match=f"{field} {message}"):
            dataclasses.replace(good, **{field: wrong})


# --- The model ------------------------------------------------------------------------------------


def images(n=3, side=16, dtype=torch.float32):
    return torch.rand(n, 3, side, side, generator=torch.Generator().manual_seed(2)).to(dtype)


def test_every_layer_of_the_decoder_has_a_result_and_the_last_is_the_model_s():
    model = detector(layers=2).eval()
    logits, boxes = model(images())
    assert logits.shape == (3, 3, 3) and boxes.shape == (3, 3, 4)
    assert 0 < boxes.min() and boxes.max() < 1
    all_logits, all_boxes = model(images(), every_layer=True)
    assert all_logits.shape == (2, 3, 3, 3) and not torch.equal(*all_logits)
    torch.testing.assert_close((all_logits[-1], all_boxes[-1]), (logits, boxes))
    model.decoder = model.decoder[:1]
    torch.testing.assert_close(model(images()), (all_logits[0], all_boxes[0]))
    assert model(images(side=24))[0].shape == (3, 3, 3)  # images may have any size


def test_queries_and_keys_have_positions_and_values_have_not():
    seen = []

    class Seen(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()

        def forward(self, q, k, v, **masks):
            seen.append((q, k, v))
            return torch.zeros_like(q), None

    model = DetectionTransformer(2, Config(dim=8, heads=2, layers=1, attention=Seen)).eval()
    model(images(side=24))
    (q, k, v), (dq, dk, dv), (cq, ck, cv) = seen
    tokens, positions = model._tokens(images(side=24))
    layer = model.encoder[0]
    assert torch.equal(q, k) and torch.equal(dq, dk)
    torch.testing.assert_close(v, layer.norm1(tokens))
    torch.testing.assert_close(q - v, positions.expand_as(q))
    torch.testing.assert_close(positions, 2 * grid_positions(3, 3, 8))
    torch.testing.assert_close(dq - dv, model.asked.expand_as(dq))
    assert (dv == dv[:, :1]).all()  # the decoder begins with zeros
    memory = model.encoder_norm(tokens + layer.feedforward(layer.norm2(tokens)))
    torch.testing.assert_close(cv, memory)
    torch.testing.assert_close(ck - cv, positions.expand_as(ck))
    torch.testing.assert_close(cq, model.decoder[0].norm3(torch.zeros_like(cq)) + model.asked)


def test_positions_tell_all_places_apart():
    for dim in (8, 9, 64):
        found = grid_positions(4, 6, dim)
        assert found.shape == (24, dim)
        assert torch.cdist(found, found).add(torch.eye(24)).min() > 0.1
    grid = grid_positions(4, 6, 8).view(4, 6, 8)
    assert (grid[..., :4] == grid[:, :1, :4]).all() and (grid[..., 4:] == grid[:1, :, 4:]).all()


@pytest.mark.parametrize("place", PLACES)
def test_each_place_has_an_attention_of_its_own(place):
    calls = dict.fromkeys(("here", "elsewhere"), 0)

    def count(name, q, k, v, **masks):
        calls[name] += 1
        return softmax_attention(q, k, v, **masks)

    here, elsewhere = (functools.partial(count, name) for name in calls)
    config = Config(dim=8, heads=2, layers=2, hidden=8, attention=elsewhere)
    model = DetectionTransformer(2, config, **{place: here})
    model(images())
    assert calls == {"here": 2, "elsewhere": 4}
    linear = DetectionTransformer(2, config, **{place: linear_attention})
    assert repr(model) != repr(linear)  # so that checkpoints distinguish them
    layers = DetectionTransformer(2, config, **{place: MultiheadAttention})
    assert layers(images())[0].shape == (3, 6, 3) and calls == {"here": 2, "elsewhere": 8}


def test_maps_are_those_of_the_forward_pass():
    model = detector(layers=2, dropout=0.2, attention=linear_attention, cross=softmax_attention)
    layer, seen = model.decoder[1].cross, {}
    layer.register_forward_hook(lambda _, given, out: seen.update(given=given, out=out[0]))
    maps = model.attention_maps(images())
    assert model.training
    for name, shape in dict(encoder=(3, 2, 4, 4), decoder=(3, 2, 3, 3), cross=(3, 2, 3, 4)).items():
        assert [A.shape for A in maps[name]] == [shape] * 2
        for A in maps[name]:
            torch.testing.assert_close(A.sum(-1), torch.ones_like(A.sum(-1)))
    model.eval()(images())
    (_, _, v), out = seen.values()
    W, b = layer.in_proj_weight[16:], layer.in_proj_bias[16:]
    values = nn.functional.linear(v, W, b).unflatten(-1, (2, 4)).transpose(1, 2)
    mixed = layer.out_proj((maps["cross"][1] @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixed, out)
    blind = detector(cross=functools.partial(PrimalAttention, directions=2, landmarks=3))
    with pytest.raises(ValueError, match="the attention at cross has no weights"):
        blind.attention_maps(images())


def test_wrong_models_and_images():
    bad = [
        (ValueError, "classes is 0; expected a whole number", dict(classes=0)),
        (TypeError, "queries is of type float; expected a whole", dict(queries=2.0)),
        (TypeError, "config is 8; expected a Config", dict(config=8)),
        (TypeError, "cross is 'softmax'; expected a function, or a class", dict(cross="softmax")),
    ]
    assert_named(bad, DetectionTransformer, classes=2, config=Config(dim=8, heads=2))
    for wrong, error in ((images()[0], ValueError), (images().long(), ValueError), (3, TypeError)):
        with pytest.raises(error, match="images is .*; expected"):
            detector()(wrong)


# --- The loss -------------------------------------------------------------------------------------


def giou_by_hand(one, other):
    """From the definition, one pair of boxes at a time."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = one.tolist(), other.tolist()
    sides = [
        (min(a + r / 2, b + s / 2) - max(a - r / 2, b - s / 2),
         max(a + r / 2, b + s / 2) - min(a - r / 2, b - s / 2))
        for a, r, b, s in ((ax, aw, bx, bw), (ay, ah, by, bh))
    ]  # fmt: skip
    shared = max(0, sides[0][0]) * max(0, sides[1][0])
    hull, union = sides[0][1] * sides[1][1], aw * ah + bw * bh - shared
    return shared / union - (hull - union) / hull


def test_giou_is_its_definition():
    one, other = torch.rand(2, 200, 4, dtype=torch.float64)
    expected = [giou_by_hand(a, b) for a, b in zip(one, other, strict=True)]
    torch.testing.assert_close(box_giou(one, other), one.new_tensor(expected))
    torch.testing.assert_close(box_giou(one, one), torch.ones(200, dtype=torch.float64))
    far = torch.tensor([[0.0, 0, 1e-3, 1e-3], [1, 1, 1e-3, 1e-3]])
    assert box_giou(*far) == pytest.approx(-1, abs=1e-4)
    touching = torch.tensor([[0.25, 0.5, 0.5, 1], [0.75, 0.5, 0.5, 1]])
    assert box_giou(*touching) == 0
    empty = torch.zeros(4, requires_grad=True)
    box_giou(empty, torch.zeros(4)).backward()
    assert torch.isfinite(empty.grad).all()


def results(B=4, Q=3, C=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, Q, C + 1, generator=generator, dtype=torch.float64)
    return logits, torch.rand(B, Q, 4, generator=generator, dtype=torch.float64)


def test_the_match_is_the_cheapest_of_all():
    given, (logits, found) = scenes(8), results(8, Q=4)
    boxes = given.boxes.double()
    image, query, thing = match(logits, found, boxes, given.labels)
    chances = logits.softmax(-1)

    def cost(i, q, k):
        l1 = (found[i, q] - boxes[i, k]).abs().sum()
        p = chances[i, q, given.labels[i, k]]
        return float(5 * l1 - 2 * giou_by_hand(found[i, q], boxes[i, k]) - p)

    for i in range(8):
        pairs = [(q, k) for j, q, k in zip(image, query, thing, strict=True) if j == i]
        things = range(int(given.counts[i]))
        assert sorted(int(k) for _, k in pairs) == list(things)
        best = min(
            sum(cost(i, q, k) for q, k in zip(order, things, strict=True))
            for order in itertools.permutations(range(4), len(things))
        )
        assert sum(cost(i, q, k) for q, k in pairs) == pytest.approx(best)


def test_of_more_objects_than_queries_some_stay_alone():
    given, (logits, found) = scenes(4), results(4, Q=1)
    image, query, _ = match(logits, found, given.boxes.double(), given.labels)
    assert image.tolist() == [0, 1, 2, 3] and (query == 0).all()


class Fixed(DetectionTransformer):
    """Returns what it is told; the same from every layer of two."""

    def __init__(self, logits, boxes):
        super().__init__(2, Config(dim=8, heads=2, layers=1))
        self.result = logits, boxes

    def forward(self, images, every_layer=False):
        rows = [x[: len(images)] for x in self.result]
        return tuple(torch.stack([x, x]) for x in rows) if every_layer else tuple(rows)


def test_the_loss_is_what_its_docstring_says():
    given, (logits, found) = scenes(4), results(4)
    boxes = given.boxes.double()
    batch = (given.images, boxes, given.labels)
    model = Fixed(logits, found).eval()
    loss, numbers = detection_loss(model, batch)
    image, query, thing = match(logits, found, boxes, given.labels)
    wanted = {(i, q): k for i, q, k in torch.stack([image, query, thing], 1).tolist()}
    expected = dict.fromkeys(("class", "l1", "giou"), 0.0)
    for i, q in itertools.product(range(4), range(3)):
        chances = logits[i, q].log_softmax(0)
        if (i, q) not in wanted:
            expected["class"] -= 0.1 * float(chances[2])
            continue
        k = wanted[i, q]
        expected["class"] -= float(chances[given.labels[i, k]])
        expected["l1"] += float((found[i, q] - boxes[i, k]).abs().sum())
        expected["giou"] += 1 - giou_by_hand(found[i, q], boxes[i, k])
    n = int(given.counts.sum())
    for name, value in expected.items():
        assert numbers[name].value == pytest.approx(value / n) and numbers[name].count == n
    total = (expected["class"] + 5 * expected["l1"] + 2 * expected["giou"]) / n
    assert float(loss) == pytest.approx(total) == numbers["loss"].value
    both, reported = detection_loss(model.train(), batch)
    assert float(both) == pytest.approx(2 * total) and reported == numbers


def test_images_without_objects_are_learned_from():
    model, given = detector(), scenes(3)
    batch = (given.images, given.boxes * 0, torch.full_like(given.labels, -1))
    loss, numbers = detection_loss(model, batch)
    loss.backward()
    assert loss > 0 and numbers["l1"].value == numbers["giou"].value == 0
    nothing = (given.images, given.boxes[:, :0], given.labels[:, :0])
    assert detection_loss(model.eval(), nothing)[0] == detection_loss(model, batch)[0]


def test_every_parameter_has_a_gradient():
    model, given = detector(layers=2), scenes()
    loss, _ = detection_loss(model, (given.images, given.boxes, given.labels))
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_what_is_not_finite_is_told_by_the_trainer():
    model = detector()
    model.locate[-1].bias.data[0] = torch.nan
    with pytest.raises(FloatingPointError, match="loss is nan .* in epoch 1, step 1"):
        fit(model, SceneBatches(scenes()), detection_loss, epochs=1)


def test_wrong_batches():
    with pytest.raises(TypeError, match="scenes is Tensor; expected Scenes, as from make_scenes"):
        SceneBatches(scenes().images)
    with pytest.raises(ValueError, match="scenes has no images; expected at least one"):
        SceneBatches(scenes()[:0])
    with pytest.raises(ValueError, match="steps is 0; expected a whole number, at least 1"):
        SceneBatches(scenes(), steps=0)
    with pytest.raises(TypeError, match="model is ByteLM; expected a DetectionTransformer"):
        evaluate(writer(), SceneBatches(scenes()), detection_loss)
    other = DetectionTransformer(3, Config(dim=8, heads=2))
    with pytest.raises(ValueError, match="batches.scenes has 2 classes; expected 3, as the model"):
        evaluate(other, SceneBatches(scenes()), detection_loss)


# --- Average precision ----------------------------------------------------------------------------


def perfect(given):
    """Each object is found; where there is none, an unlikely class somewhere in the image."""
    real = given.labels >= 0
    elsewhere = torch.tensor([0.01, 0.01, 0.005, 0.005])
    boxes = torch.where(real[..., None], given.boxes, elsewhere)
    return Detections(torch.where(real, 0.9, 0.01), given.labels.clamp(min=0), boxes)


def test_perfect_detections_and_those_of_other_classes():
    given = make_scenes(40, 1)
    enlarged = given.sizes * torch.tensor([1, 3, 8, 8]).repeat(10)[:, None]  # some of every size
    found = average_precision(perfect(given), dataclasses.replace(given, sizes=enlarged))
    assert found == pytest.approx(dict.fromkeys(found, 1.0))
    wrong = dataclasses.replace(perfect(given), labels=(given.labels.clamp(min=0) + 1) % 5)
    found = average_precision(wrong, given)
    assert found["AP"] < 0.05 and np.isnan(found["AP_large"])  # no box has 96² pixels


def one_scene(*boxes):
    sizes, labels = torch.tensor([[100, 100]]), torch.zeros(1, len(boxes), dtype=torch.int64)
    return Scenes(torch.zeros(1, 3, 100, 100), torch.tensor([boxes]), labels, sizes, ("cat",))


def test_a_case_by_hand(capsys):
    """One class, two objects. The best detection misses, the next two hit with IoU 0.58 and 1.

    Precision is 0, 1/2, 2/3 at recall 0, 1/2, 1; its envelope is 2/3 at all recalls: AP50 is 2/3.
    For 0.75 only the last hits: precision 1/3 up to recall 1/2, of 101 recalls that is 51.
    """
    given = one_scene((0.25, 0.25, 0.2, 0.2), (0.75, 0.75, 0.2, 0.2))
    boxes = [[0.25, 0.75, 0.2, 0.2], [0.25, 0.25, 0.2, 0.116], [0.75, 0.75, 0.2, 0.2]]
    scores, labels = torch.tensor([[0.9, 0.8, 0.7]]), torch.zeros(1, 3, dtype=torch.int64)
    detections = Detections(scores, labels, torch.tensor([boxes]))
    found = average_precision(detections, given)
    assert found["AP50"] == pytest.approx(2 / 3)
    assert found["AP75"] == pytest.approx(51 / 101 / 3)
    assert found["AP"] == pytest.approx((2 * 2 / 3 + 8 * 51 / 101 / 3) / 10)  # an IoU of
    # 0.58 meets the first two thresholds, 0.5 and 0.55
    assert found["AP_small"] == found["AP"] and np.isnan(found["AP_medium"])  # 400 pixels each
    assert not capsys.readouterr().out


def test_boxes_count_in_pixels_of_the_photograph():
    given = one_scene((0.5, 0.5, 0.5, 0.5))
    whole = dataclasses.replace(given, sizes=torch.tensor([[640, 480]]))
    detections = Detections(torch.tensor([[0.9]]), given.labels, given.boxes)
    assert average_precision(detections, given)["AP_medium"] == pytest.approx(1)
    assert average_precision(detections, whole)["AP_large"] == pytest.approx(1)


def test_what_a_model_detects():
    model = detector().train()
    given = scenes()
    found = detect(model, given.images, batch_size=5)
    assert model.training and len(found) == 24
    logits, boxes = model.eval()(given.images)
    chances = logits.softmax(-1)[..., :2]
    torch.testing.assert_close(found.scores, chances.amax(-1))
    assert torch.equal(found.labels, chances.argmax(-1))
    torch.testing.assert_close(found.boxes, boxes)
    fixed = torch.cat([torch.eye(2).expand(24, 2, 2) * 9, torch.zeros(24, 2, 1)], -1)
    fixed[::3, 1] = torch.tensor([0.0, 0.0, 9.0])
    right = detect(Fixed(fixed, given.boxes.clamp(min=0.01)), given.images)
    assert average_precision(right, given)["AP"] == pytest.approx(1)


def test_wrong_detections():
    given = scenes()
    good = perfect(given)
    other = functools.partial(dataclasses.replace, good)
    labels, boxes = other(labels=good.labels + 1), other(boxes=good.boxes[:, 1:])
    bad = [
        (
            TypeError,
            "detections is NoneType; expected Detections, as from detect",
            dict(detections=None),
        ),
        (TypeError, "scenes is NoneType; expected Scenes, as from make_scenes", dict(scenes=None)),
        (ValueError, "detections has 24 images; expected 3, as scenes", dict(scenes=given[:3])),
        (ValueError, "detections.labels holds 1 to 2; expected", dict(detections=labels)),
        (ValueError, "boxes has shape", dict(detections=boxes)),
    ]
    assert_named(bad, average_precision, detections=good, scenes=given)
    with pytest.raises(TypeError, match="model is ByteLM; expected a DetectionTransformer"):
        detect(writer(), given.images)
    with pytest.raises(TypeError, match="images is Scenes; expected a tensor"):
        detect(detector(), given)
