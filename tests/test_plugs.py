"""Tests of every mechanism inside the models of Transformers and timm."""

from __future__ import annotations

import copy
import json
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_all_close, every_causal_mechanism, every_mechanism
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from derived_attention import elu_feature_map, flipped_elu_feature_map, linear_attention, plugs
from derived_attention.layer import MultiheadAttention
from derived_attention.registry import MECHANISMS, Entry

plugs.mend_torchvision()

import timm  # noqa: E402
import transformers  # noqa: E402

E, H, N, B = 16, 4, 12, 3
D = E // H
GRID = (4, 4)
ALIKE = {"hidden_size": E, "num_attention_heads": H, "vocab_size": 31, "num_hidden_layers": 2}
ALIKE |= {"intermediate_size": 24, "max_position_embeddings": 64, "initializer_range": 0.3}
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
HEADS = {"d_model": E, "vocab_size": 31}
WINDOW = {"sliding_window": 4}
IDS = torch.randint(1, 31, (B, N), generator=torch.Generator().manual_seed(0))
READ = {"input_ids": IDS}


def twice(**sizes):
    """Return sizes of an encoder and, the same, of a decoder."""
    return {f"{x}_{key}": n for x in ("encoder", "decoder") for key, n in sizes.items()}


BART = twice(layers=1, attention_heads=H)
CONFIGS = {
    "Llama": ("LlamaForCausalLM", ALIKE | ENDS | {"num_key_value_heads": 2}),
    "GPT2": ("GPT2LMHeadModel", {"n_embd": E, "n_head": H, "n_layer": 2, "vocab_size": 31} | ENDS),
    "Mistral": ("MistralForCausalLM", ALIKE | ENDS | {"num_key_value_heads": 2, **WINDOW}),
    "Bert": ("BertModel", ALIKE),
    "ModernBert": ("ModernBertModel", ALIKE | ENDS | {"local_attention": 4}),
    "Bart": ("BartForConditionalGeneration", HEADS | BART | {"init_std": 0.3, "dropout": 0.0}),
    "T5": ("T5ForConditionalGeneration", HEADS | {"d_kv": D, "num_heads": H, "num_layers": 2}),
}  # fmt: skip
LENGTHS = torch.tensor([N, N - 3, N - 7])
PADDING = {  # True at tokens, False at padding
    "left": torch.arange(N) >= N - LENGTHS[:, None],
    "right": torch.arange(N) < LENGTHS[:, None],
}
REFUSING = [name for name, entry in MECHANISMS.items() if entry.causal and not entry.alone]


def make(family, **changed):
    """Return a small model of theirs with random weights, in float64."""
    torch.manual_seed(0)
    kind, options = CONFIGS[family]
    config = getattr(transformers, f"{family}Config")(**options | changed)
    return getattr(transformers, kind)(config).double().eval()


def disturbed(model):
    """Return the model after random changes of its plugs' parameters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if plugs.CHILD in key:
                p.add_(0.2 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def grid_of(name, rows=3, columns=4):
    """Return the option `grid`, if a mechanism needs it."""
    return {"grid": (rows, columns)} if "grid" in MECHANISMS[name].plug(N, H, D).keywords else {}


def equipped(family, name, **changed):
    return disturbed(plugs.equip(make(family, **changed), name, N, **grid_of(name)))


def of_plugs(model):
    return {key: p for key, p in model.named_parameters() if plugs.CHILD in key}


def there_only(model, there, **given):
    """Return the first output at tokens, with padding and of each sequence alone."""
    positions = (there.cumsum(-1) - 1).clamp(min=0)
    out = model(IDS, attention_mask=there.long(), position_ids=positions, **given)[0]
    alone = [model(ids[keep][None], **given)[0][0] for ids, keep in zip(IDS, there, strict=True)]
    return [x[keep] for x, keep in zip(out, there, strict=True)], alone


def trains(model, loss_of, steps=3):
    """Check that steps of Adam reduce the loss and change all parameters of the plugs."""
    model.train()
    before = {key: p.detach().clone() for key, p in of_plugs(model).items()}
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(loss_of(model))
        losses[-1].backward()
        slopes = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(bool(x.isfinite().all()) for x in slopes)
        optimizer.step()
    assert loss_of(model).item() < losses[0].item()
    assert not any(torch.equal(p, before[key]) for key, p in of_plugs(model).items())
    model.eval()


# --- Transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
def test_softmax_is_theirs(family):
    """Test padding, their windows, T5's position bias and scale, and shared heads."""
    model, other = make(family), plugs.equip(make(family), "softmax")
    given = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    there = PADDING["right" if given else "left"]
    for mask in (None, there.long()):
        ours, theirs = (x(IDS, attention_mask=mask, **given)[0] for x in (other, model))
        seen = slice(None) if mask is None or given else there
        assert_all_close([ours[seen]], [theirs[seen]], 1e-10, family)
    asked = [x.config._attn_implementation for x in other.modules() if hasattr(x, plugs.CHILD)]
    assert asked and set(asked) == {"derived:softmax"}
    assert model.config._attn_implementation == "sdpa"


def latent(nope, rope, values):
    """Return the options of a model like DeepSeek's, whose configuration's head_dim is `rope`."""
    sizes = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": values}
    sizes |= {"q_lora_rank": 8, "kv_lora_rank": 8, "num_key_value_heads": H}
    return ALIKE | ENDS | sizes | {"mlp_layer_types": ["dense"] * 2, "first_k_dense_replace": 2}


SOUND = {"input_values": torch.randn(B, 2000, generator=torch.Generator().manual_seed(0)).double()}
EARS = {"conv_dim": (8,), "conv_stride": (40,), "conv_kernel": (80,), "num_feat_extract_layers": 1}
EARS |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
SAM = {  # 2 heads of 8 features in the image encoder, and 4 of 4 or 2 in the equipped part
    "vision_config": {"hidden_size": 16, "output_channels": 16, "num_hidden_layers": 1}
    | {"num_attention_heads": 2, "image_size": 32, "patch_size": 8, "mlp_dim": 16, "window_size": 2}
    | {"num_pos_feats": 8, "global_attn_indexes": [0]},
    "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8},
    "mask_decoder_config": {"hidden_size": 16, "num_attention_heads": 4, "mlp_dim": 16}
    | {"iou_head_hidden_dim": 16},
}
MOONSHINE = twice(num_hidden_layers=1, num_attention_heads=H)
MOONSHINE |= {"hidden_size": 20, "intermediate_size": 24, "vocab_size": 31}
MOONSHINE |= {"pad_head_dim_to_multiple_of": 8, "bos_token_id": 1, "eos_token_id": 2}
SEEN = {"pixel_values": torch.ones(1, 3, 32, 32).double()}
SEEN |= {"input_points": torch.tensor([[[[3.0, 20.0]]]]).double()}
OTHERS = {  # class, configuration, inputs, features of a head or the error
    "latent": ("Glm4MoeLiteModel", latent(12, 4, 16), READ, {16}),
    "latent, as shipped": ("Glm4MoeLiteModel", latent(192, 64, 256), READ, {256}),
    "NeoX": ("GPTNeoXModel", ALIKE | ENDS, READ, {4}),
    "Sam": ("SamModel", SAM, SEEN, {2, 4}),
    "Conformer": ("Wav2Vec2ConformerModel", ALIKE | EARS, SOUND, {4}),
    "padded": ("MoonshineModel", MOONSHINE, SOUND | {"decoder_input_ids": IDS}, {8}),
    "sinks": ("GptOssModel", ALIKE | ENDS | {"num_local_experts": 4}, READ, "s_aux"),
    "two sizes": ("DeepseekV3Model", latent(12, 4, 8), READ, "value has 8 features"),
    "eager": ("SplinterModel", ALIKE | {"question_token_id": 5}, READ, "'eager' code"),
}


def other(case, **changed):
    """Return a small model of theirs, and a function that runs it on its inputs."""
    kind, options, given, _ = OTHERS[case]
    torch.manual_seed(0)
    kind = getattr(transformers, kind)
    model = kind(kind.config_class(**options | changed)).eval()
    model = model if case == "sinks" else model.double()
    with torch.no_grad():
        for x in model.parameters():
            x.normal_(std=x[0].numel() ** -0.5) if x.dim() > 1 else None

    def run(model):
        out = model(**given)
        return out["pred_masks"] if "pred_masks" in out else out[0]

    return model, run


@pytest.mark.parametrize("case", [x for x, case in OTHERS.items() if isinstance(case[3], set)])
def test_heads_have_the_sizes_that_are_called(case, monkeypatch):
    """Check also that misread sizes give the right result or an error."""
    model, run = other(case, attn_implementation="eager")
    with torch.no_grad():
        wanted = run(model)
        wrong, plug = copy.deepcopy(model), plugs.equip(copy.deepcopy(model), "softmax")
        assert_all_close([run(plug)], [wanted], 1e-5, case)  # they compute softmax in float32
        run(plugs.equip(plug, "mgk", N))
        sizes = {x.head_dim for key, x in plug.named_modules() if key.endswith(plugs.CHILD)}
        assert sizes == OTHERS[case][3]
        monkeypatch.setattr(plugs, "_sizes", lambda module: (H, 3))
        assert_all_close([run(plugs.equip(wrong, "softmax"))], [wanted], 1e-5, case)
        with pytest.raises(ValueError, match=r"query has 4 heads of \d+ features; expected 4 of 3"):
            run(plugs.equip(wrong, "mgk", N))


@pytest.mark.parametrize("case", [x for x, case in OTHERS.items() if isinstance(case[3], str)])
def test_a_model_that_attends_otherwise_is_refused(case):
    model, run = other(case)
    with torch.no_grad():
        with pytest.raises(ValueError, match=f"{OTHERS[case][3]}.*; (expected|choose)"):
            run(plugs.equip(model, "softmax"))


def test_a_model_without_known_sizes_is_refused(monkeypatch):
    monkeypatch.setattr(plugs, "HEADS", ("heads",))
    monkeypatch.setattr(plugs, "FEATURES", ("head_dim", "features"))
    assert plugs._sizes(make("Llama").model.layers[0].self_attn) == (H, D)
    monkeypatch.setattr(plugs, "FEATURES", ("size", "features"))
    with pytest.raises(ValueError, match="LlamaAttention, whose heads or features are unknown"):
        plugs.equip(make("Llama"), "softmax")


@every_causal_mechanism
def test_a_decoder_ignores_padding_and_sees_no_future(name):
    model = equipped("Llama", name)
    with torch.no_grad():
        for side, there in PADDING.items():
            assert_all_close(*there_only(model, there), 1e-10, side)
        logits = model(IDS).logits
        changed = model(torch.cat([IDS[:, :7], IDS[:, 7:].flip(1)], 1)).logits
    assert_all_close([changed[:, :7]], [logits[:, :7]], 1e-10, "the future")
    softmax = make("Llama")(IDS).logits.detach()
    assert name == "softmax" or float((logits - softmax).abs().max()) > 1e-3


@every_causal_mechanism
def test_a_decoder_generates_with_a_cache_what_it_does_without(name):
    model, there = equipped("Llama", name), PADDING["left"].long()
    given = {"attention_mask": there, "max_new_tokens": 4, "do_sample": False}
    slow = model.generate(IDS, use_cache=False, **given)
    if name in REFUSING:
        with pytest.raises(ValueError, match=rf"{name} is called with 1 queries .* use_cache"):
            model.generate(IDS, **given)
        return
    assert torch.equal(model.generate(IDS, **given), slow)
    assert torch.equal(model.generate(IDS, cache_implementation="static", **given), slow)
    with torch.no_grad():  # in two chunks
        start = model(IDS[:, :5], attention_mask=there[:, :5])
        rest = model(IDS[:, 5:], attention_mask=there, past_key_values=start.past_key_values)
        whole = model(IDS, attention_mask=there).logits
    assert_all_close([rest.logits[there[:, 5:] > 0]], [whole[:, 5:][there[:, 5:] > 0]], 1e-10)


@pytest.mark.parametrize("name", [name for name, entry in MECHANISMS.items() if not entry.causal])
def test_a_decoder_refuses_what_sees_the_future(name):
    with pytest.raises(ValueError, match=f"{name} is in a causal model; expected one of softmax"):
        equipped("Llama", name)


def with_projections(name, plug, length, W, b):
    """Return a mechanism's layer with the projections W (3 E, E) and b and a plug's parameters.

    A plug applies its parameters to projected tokens, a layer to tokens: some are converted.
    """
    entry = MECHANISMS[name]
    run = entry.plug(length, H, D)
    if entry.layer == Entry.layer:
        layer = MultiheadAttention(E, H, attention=run)
    else:
        layer = run(E, H, **{x: vars(plug)[x] for x in ("grid", "class_token") if x in vars(plug)})
    state = {key: x.detach() for key, x in plug.state_dict().items() if "_extra_" not in key}
    if "key_weight" in state:
        state["key_bias"] = state["key_weight"] @ b[E : 2 * E]
        state["key_weight"] = state["key_weight"] @ W[E : 2 * E]
    for x in {"strength", "forgetting"} & {key.partition(".")[0] for key in state}:
        state[f"{x}.bias"] = state[f"{x}.bias"] + state[f"{x}.weight"] @ b[E : 2 * E]
        state[f"{x}.weight"] = state[f"{x}.weight"] @ W[E : 2 * E]
    if "packed" in state:
        state["packed"] = torch.linalg.solve(W[:E], (state["packed"] - b[:E]).T).T
    state |= {"in_proj_weight": W, "in_proj_bias": b}
    state |= {"out_proj.weight": torch.eye(E), "out_proj.bias": torch.zeros(E)}
    layer = layer.double().eval()
    layer.load_state_dict(state)
    return layer


@every_mechanism
def test_an_encoder_attends_as_the_layer_does_and_ignores_padding(name):
    model = equipped("Bert", name)
    attend, seen = model.encoder.layer[1].attention.self, {}
    with torch.no_grad():
        for x in (attend.query, attend.key, attend.value):
            x.bias.normal_()
    attend.register_forward_hook(lambda _, args, out: seen.update(x=args[0], y=out[0]))
    with torch.no_grad():
        model(IDS)
        three = (attend.query, attend.key, attend.value)
        W, b = (torch.cat([getattr(x, key).detach() for x in three]) for key in ("weight", "bias"))
        layer = with_projections(name, getattr(attend, plugs.CHILD), N, W, b)
        wanted = layer(seen["x"], seen["x"], seen["x"], need_weights=False)[0]
        assert_all_close([seen["y"]], [wanted], 1e-9)
        for side, there in PADDING.items():
            if grid_of(name):
                with pytest.raises(ValueError, match="expected 12 tokens, for the grid 3 x 4"):
                    there_only(model, there)
            else:
                assert_all_close(*there_only(model, there), 1e-10, side)


@every_mechanism
def test_dropped_weights_are_right_on_average(name):
    """Average 4000 copies of one sequence, with half of the weights dropped in each."""
    own = {"dtype": torch.float64} | grid_of(name, 1, 5)
    layer, module = plugs.make_heads(name, 2, 4, 5, **own), nn.Module()
    layer.plugged = name
    module.add_module(plugs.CHILD, layer)
    module.is_causal = False
    plugs.register()
    run = transformers.AttentionInterface._global_mapping[plugs.PREFIX + name]
    q, k, v = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0)).double()
    torch.manual_seed(0)
    exact = run(module.eval(), q, k, v, None)[0]
    many = (x.expand(4000, -1, -1, -1) for x in (q, k, v))
    found = run(module.train(), *many, None, dropout=0.5)[0]
    error = (found.mean(0) - exact[0]) / (found.std(0) / 4000**0.5).clamp(min=1e-9)
    assert float(error.abs().max()) < 5 and float(found.std(0).max()) > 1e-3


@every_mechanism
def test_an_encoder_and_a_decoder(name):
    """Test attention to another sequence, or a mechanism in the encoder only."""
    entry, model, there = MECHANISMS[name], make("Bart"), PADDING["right"].long()
    there = torch.ones_like(there) if grid_of(name) else there  # a grid has no padding
    able = entry.causal and entry.alone and not entry.placed
    if not able:
        with pytest.raises(ValueError, match=f"{name} is in .*; expected one of softmax, linear"):
            plugs.equip(make("Bart"), name, N)
    part = model if able else model.model.encoder
    disturbed(plugs.equip(part, name, N, **grid_of(name)))
    answers = IDS[:, :5].flip(0)
    with torch.no_grad():
        out = model(IDS, attention_mask=there, decoder_input_ids=answers).logits
        for one, keep, answer, wanted in zip(IDS, there.bool(), answers, out, strict=True):
            found = model(one[keep][None], decoder_input_ids=answer[None]).logits[0]
            assert_all_close([found], [wanted], 1e-10)
        more = torch.cat([answers, IDS[:, 5:]], 1)  # as long as the other sequence
        longer = model(IDS, attention_mask=there, decoder_input_ids=more).logits
        assert_all_close([longer[:, :5]], [out], 1e-10)
    trains(model, lambda x: x(IDS, attention_mask=there, labels=answers).loss)
    which = model.model.decoder.config._attn_implementation
    assert which == (plugs.PREFIX + name if part is model else "sdpa")
    given = {"attention_mask": there, "max_new_tokens": 4, "do_sample": False}
    slow = model.generate(IDS, use_cache=False, **given)
    assert torch.equal(model.generate(IDS, **given), slow)


def test_what_a_mechanism_cannot_do_is_an_error():
    with pytest.raises(ValueError, match="name is 'mgkk'; expected one of softmax, linear"):
        plugs.equip(make("Llama"), "mgkk")
    with pytest.raises(ValueError, match="model is a Linear; expected one that uses Attention"):
        plugs.equip(nn.Linear(1, 1), "mgk")
    plugs.register()
    model = make("Llama", attn_implementation="derived:linear")
    with pytest.raises(ValueError, match="LlamaAttention without linear; expected .*equip"):
        model(IDS)
    with pytest.raises(ValueError, match="luna"):
        plugs.equip(model := make("Bart"), "luna")
    assert not of_plugs(model)  # the refused model is unchanged
    with pytest.raises(ValueError, match="position_bias is given; expected None: linear"):
        plugs.equip(make("T5"), "linear")(IDS, decoder_input_ids=IDS)
    with pytest.raises(ValueError, match="a window, a chunk.* linear takes no other mask"):
        plugs.equip(make("Mistral"), "linear")(IDS)
    square = torch.ones(B, 1, N, N, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"attention_mask has shape \(3, 1, 12, 12\).*linear ta"):
        plugs.equip(make("Llama"), "linear")(IDS, attention_mask=square)
    model = plugs.equip(make("Llama"), "softmax")
    with pytest.raises(ValueError, match="softcap is 30.0; expected None: softmax does not"):
        model(IDS, softcap=30.0)


@every_mechanism
def test_a_registry_entry_says_what_matters_to_a_query(name):
    """Check `alone`, that other queries do not matter, and `placed`, that positions matter."""
    layer = plugs.make_heads(name, H, D, N, dtype=torch.float64, **grid_of(name)).eval()
    x = torch.randn(4, 1, N, E, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype))
        others = torch.cat([x[3, :, :-1], x[0, :, -1:]], 1)
        one, other, turned = (
            plugs._run(layer, q, x[1], x[2], False, True) for q in (x[0], others, x[0].roll(1, 1))
        )

    def same(a, b):
        return torch.allclose(a, b, rtol=1e-10, atol=1e-10)

    entry = MECHANISMS[name]
    assert same(one[:, -1], other[:, -1]) == entry.alone
    assert same(one.roll(1, 1), turned) == (entry.alone and not entry.placed)


# --- Transformers: saving and loading ------------------------------------------------------------


def output(model):
    given = {"decoder_input_ids": IDS.flip(0)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(IDS, **given)[0]


def saved(model, folder, **how):
    model.save_pretrained(folder, **how)
    return folder


@every_mechanism
def test_a_folder_is_loaded_as_what_it_was(name, tmp_path):
    """Check also that Transformers alone names the package and the mechanism in an error."""
    model = equipped("Bert", name)
    folder = saved(model, tmp_path / "one")
    wanted = rf"derived_attention.plugs.load: {name}\("
    assert re.match(wanted, json.loads((folder / "config.json").read_text())["attn_implementation"])
    for kind in (transformers.BertModel, transformers.AutoModel):
        with pytest.raises(ValueError, match=wanted):
            kind.from_pretrained(folder)
    one = plugs.load(folder)
    assert type(one) is transformers.BertModel and not one.training
    assert torch.equal(output(one), output(model))
    two = plugs.load(saved(one, tmp_path / "two", max_shard_size="2KB"))
    assert (tmp_path / "two" / "model.safetensors.index.json").exists()
    assert two.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(x, model.state_dict()[key]) for key, x in two.state_dict().items())
    assert torch.equal(output(copy.deepcopy(two)), output(model))
    half = plugs.load(saved(model.bfloat16(), folder))  # a second time, into the same folder
    assert {x.dtype for x in half.parameters()} == {torch.bfloat16}
    assert torch.equal(output(half), output(model))
    assert plugs.load(folder, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("window", {"window": 2}),
        ("conv1d", {"kernel_size": 3}),
        ("fmm", {"window": 1, "feature_maps": (flipped_elu_feature_map, elu_feature_map)}),
        ("fmm", {"window": 0, "feature_maps": [elu_feature_map]}),
        ("mrs", {"scales": [1, 1, 4, 4]}),
        ("mrs", {"scales": (1, 2, 2, 2), "attention": linear_attention}),
        ("mrs", {"scales": (1, 2, 2, 2), "attention": partial(linear_attention, scale=0.3)}),
        ("mgk", {"variances": (1.0, 3.0)}),
        ("bn", {"beta": 0.3}),
    ],
)
def test_options_travel(name, options, tmp_path):
    model = disturbed(plugs.equip(make("Llama"), name, N, **options))
    default = equipped("Llama", name)
    assert not torch.allclose(output(default), output(model), atol=1e-4)
    assert torch.equal(output(plugs.load(saved(model, tmp_path))), output(model))
    with pytest.raises((ValueError, RuntimeError)):  # options or shapes differ
        default.load_state_dict(model.state_dict())


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_loaded(family, tmp_path):
    name = "softmax" if family == "T5" else "mgk"  # T5 adds a bias to scores
    model = equipped(family, name)
    one = plugs.load(saved(model, tmp_path))
    assert type(one) is type(model) and torch.equal(output(one), output(model))
    assert one.config._attn_implementation == f"derived:{name}"
    assert one.state_dict().keys() == model.state_dict().keys()
    one.save_pretrained(tmp_path / "again")
    assert torch.equal(output(plugs.load(tmp_path / "again")), output(model))


def test_with_a_head_or_without(tmp_path):
    model = equipped("Llama", "mgk")
    bare = plugs.load(saved(model, tmp_path / "head"), transformers.LlamaModel)
    assert torch.equal(output(bare), model.model(IDS)[0])
    bare = plugs.load(saved(bare, tmp_path / "bare"))
    assert type(bare) is transformers.LlamaModel
    again = plugs.load(tmp_path / "bare", transformers.LlamaForCausalLM)
    assert torch.equal(output(again.model), output(bare))
    again.save_pretrained(tmp_path / "again")
    with pytest.raises(ValueError, match="derived_attention.plugs.load: mgk"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "again")
    encoder = plugs.load(saved(equipped("T5", "mgk"), tmp_path / "T5"), transformers.T5EncoderModel)
    assert encoder.config._attn_implementation == "derived:mgk"
    with pytest.raises(ValueError, match="at model.layers.0.self_attn.*; expected the class that"):
        plugs.load(tmp_path / "head", transformers.BertModel)


def test_parts_are_loaded_as_they_were(tmp_path):
    for family, parts in {
        "Bart": {"model.encoder": ["luna"]},
        "T5": {"encoder": ["mgk"], "decoder": ["softmax"]},
        "Bart, whole": {"": ["linear"], "model.encoder": ["luna", "mra"]},  # equipped again
    }.items():
        model = make(family.split(",")[0])
        for path, names in parts.items():
            for name in names:
                disturbed(plugs.equip(model.get_submodule(path), name, N))
        one = plugs.load(saved(model, tmp_path / family))
        for path, names in parts.items():
            found = one.get_submodule(path).config._attn_implementation
            assert found == plugs.PREFIX + names[-1]
        assert one.config._attn_implementation == model.config._attn_implementation
        assert one.state_dict().keys() == model.state_dict().keys()
        assert torch.equal(output(one), output(model))


def test_transformers_alone_refuses_a_whole_and_warns_of_a_part(tmp_path, caplog):
    """Check that nobody gets softmax attention silently without the package."""
    whole = saved(plugs.equip(make("Llama"), "window", window=2), tmp_path / "whole")
    with pytest.raises(ValueError, match=r"load: window\(window=2\).` is not supported"):
        transformers.AutoModel.from_pretrained(whole)
    model = make("T5")
    plugs.equip(model.encoder, "luna", N)
    transformers.T5ForConditionalGeneration.from_pretrained(saved(model, tmp_path / "part"))
    warned = r"SelfAttention.derived_attention.luna._extra_state +. UNEXPECTED"
    assert re.search(warned, caplog.text)


def rewritten(folder, name, options):
    """Change mechanism and options in a folder's file; return the folder."""
    path = folder / "model.safetensors"
    state = load_file(path)
    for key in [key for key in state if key.endswith("_extra_state")]:
        record = json.loads(bytes(state.pop(key).tolist())) | {"options": options}
        text = torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8)
        state[key.replace(".window.", f".{name}.")] = text
    save_file(state, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("mgkk", {}, "has the mechanism 'mgkk'; expected one of this version of derived_attention"),
        ("window", {"radius": 3}, "options {'radius': 3}, which this version .* no option radius"),
        ("mgk", {"radius": 3}, "mgk with the options {'radius': 3}, which this .* 'radius'"),
        ("window", {"window": {"other": "x"}}, "the option window is x, which cannot be loaded"),
        ("window", {"window": {"function": "os.system"}}, "window is os.system, which cannot be"),
        ("window", {"window": {"function": "derived_attention.plugs.os"}}, "plugs.os, which can"),
    ],
)
def test_what_cannot_be_loaded_is_said(name, options, error, tmp_path):
    folder = saved(plugs.equip(make("Llama"), "window", N), tmp_path)
    with pytest.raises(ValueError, match=error):
        plugs.load(rewritten(folder, name, options))


def test_what_is_no_such_folder_is_said(tmp_path):
    for folder in (saved(make("Llama"), tmp_path / "plain"), tmp_path, "gpt2"):
        with pytest.raises(ValueError, match="folder is .*, where no model.safetensors has an att"):
            plugs.load(folder)
    folder = saved(plugs.equip(make("Llama"), "linear"), tmp_path)
    with pytest.raises(TypeError, match="kind is .*AutoModel.*LlamaForCausalLM.*; expected a cl"):
        plugs.load(folder, transformers.AutoModel)


def test_a_function_of_ones_own_is_for_its_owner_to_give(tmp_path):
    def square(x):
        return x.square()

    maps = {"feature_maps": (square,)}
    model = plugs.equip(make("Llama"), "fmm", N, **maps)
    with pytest.raises(ValueError, match="feature_maps is .*square, which cannot .* equip it"):
        plugs.load(saved(model, tmp_path))
    other = plugs.equip(make("Llama"), "fmm", N, **maps)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)  # tied weights
    assert torch.equal(output(other), output(model))


def test_state_dicts_are_of_one_mechanism():
    """Refuse weights of a plain model, of other options and of another mechanism."""
    state = plugs.equip(make("Llama"), "window", window=2).state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*derived_attention.window._extra_st"):
        make("Llama").load_state_dict(state)
    with pytest.raises(RuntimeError, match="derived_attention.linear._extra_state"):
        plugs.equip(make("Llama"), "linear").load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key.*derived_attention.window._extra_state"):
        plugs.equip(make("Llama"), "window").load_state_dict(make("Llama").state_dict())
    other = plugs.equip(make("Llama"), "window", window=3)
    with pytest.raises(ValueError, match="window with the options {'window': 2}; expected {'windo"):
        other.load_state_dict(state)
    with pytest.raises(TypeError, match="no option wide; it has dropout_p, scale, enable_gqa, win"):
        plugs.equip(make("Llama"), "window", wide=3)


# --- timm ----------------------------------------------------------------------------------------


def vision(**changed):
    """Return their ViT-Ti with two narrow blocks, for images of 4 x 4 patches."""
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": E, "num_heads": H, "depth": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes | changed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4) if p.dim() > 1 else None
    return model.double().eval()


IMAGES = torch.randn(B, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()


@every_mechanism
@pytest.mark.parametrize("class_token", [True, False])
def test_a_vision_transformer_attends_as_the_layer_does(name, class_token):
    changed = {} if class_token else {"class_token": False, "global_pool": "avg"}
    model = disturbed(plugs.equip_timm(vision(**changed), name))
    attn, seen = model.blocks[1].attn, {}
    with torch.no_grad():
        attn.qkv.bias.normal_()
    attn.register_forward_hook(lambda _, args, out: seen.update(x=args[0], y=out))
    model(IMAGES)
    length = 16 + class_token
    plug, state = getattr(attn, plugs.CHILD), attn.qkv.state_dict()
    layer = with_projections(name, plug, length, state["weight"], state["bias"])
    layer.out_proj.load_state_dict(attn.proj.state_dict())
    x = seen["x"]
    assert_all_close([layer(x, x, x, need_weights=False)[0]], [seen["y"]], 1e-9)


@every_mechanism
def test_a_vision_transformer_keeps_its_weights_and_trains_and_is_saved(name, tmp_path):
    theirs = vision()
    model = plugs.equip_timm(copy.deepcopy(theirs), name)
    state = {key: x for key, x in model.state_dict().items() if plugs.CHILD not in key}
    assert state.keys() == theirs.state_dict().keys()
    assert all(torch.equal(x, theirs.state_dict()[key]) for key, x in state.items())
    same = float((model(IMAGES) - theirs(IMAGES)).abs().max())
    assert same < 1e-12 if name == "softmax" else same > 1e-6 or name.startswith("conv")
    trains(disturbed(model), lambda x: F.cross_entropy(x(IMAGES), torch.arange(B)))
    save_model(model, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=rf"blocks.0.attn.derived_attention.{name}._extra_state"):
        load_model(vision(), tmp_path / "model.safetensors")
    other = plugs.equip_timm(vision(), name)
    load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(other(IMAGES), model(IMAGES))


def test_timm_says_what_is_wrong():
    with pytest.raises(ValueError, match="name is 'mgkk'; expected one of softmax, linear"):
        plugs.equip_timm(vision(), "mgkk")
    with pytest.raises(ValueError, match="model is a Linear without timm's Attention"):
        plugs.equip_timm(nn.Linear(1, 1), "softmax")
    with pytest.raises(ValueError, match="model has 3 tokens before its patches; .* 1 for sh"):
        plugs.equip_timm(vision(reg_tokens=2), "sh")
    model = plugs.equip_timm(vision(reg_tokens=2), "mgk")
    assert model(IMAGES).shape == (B, 5)
    with pytest.raises(ValueError, match="that is not equipped yet"):
        plugs.equip_timm(model, "mgk")
    free = timm.create_model("naflexvit_base_patch16_gap", embed_dim=E, num_heads=H, depth=1)
    with pytest.raises(ValueError, match="NaFlexVit without prefix tokens before one grid of pat"):
        plugs.equip_timm(free, "softmax")


def test_timm_drops_in_training_only():
    model = plugs.equip_timm(vision(attn_drop_rate=0.5), "mgk")
    out = model(IMAGES)
    assert torch.equal(model(IMAGES), out)
    dropped = model.train()(IMAGES)
    assert not torch.allclose(dropped, out) and not torch.equal(model(IMAGES), dropped)


# --- PyTorch: its decoder, besides the tests in `test_contract_places` ----------------------------


@every_causal_mechanism
def test_in_cross_attention_a_padded_memory_is_a_shorter_one(name):
    if name in REFUSING or MECHANISMS[name].placed:
        return
    layer = MECHANISMS[name].make_layer(E, H, N, cross=True).double()
    x, memory = torch.randn(2, B, N, E, generator=torch.Generator().manual_seed(0)).double()
    out = layer(x, memory, memory, ~PADDING["right"], need_weights=False)[0]
    for one, y, n, wanted in zip(x, memory, LENGTHS, out, strict=True):
        found = layer(one, y[:n], y[:n], need_weights=False)[0]
        assert_all_close([found], [wanted], 1e-10)
