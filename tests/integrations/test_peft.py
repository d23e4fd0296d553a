"""LoRA by PEFT on a tiny language model with random weights: trained by the Trainer, and its posterior."""

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")

import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from transformers import LlamaConfig, LlamaForCausalLM

import bsam
from tests.integrations.devices import on_devices
from tests.integrations.test_transformers import (
    WithScaler,
    assert_equal_weights,
    in_steps,
    num_tokens,
    plain_loop,
    sentences,
    tokens_loss,
    train,
)
from tests.integrations.two_processes import TIMEOUT, run_two_ranks

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def base(seed=0, width=8):
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=2, **sizes))


def config(**options):
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)


def lora(seed=1, name="default", model=None, **options):
    """A base model, the same in all calls, with fresh adapters."""
    model = base() if model is None else model
    torch.manual_seed(seed)
    return get_peft_model(model, config(**options), adapter_name=name)


def make_bsam(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return bsam.BSAM(trained, lr=0.1, num_data=84, rho=0.05, betas=(0.9, 0.5), module=model)


def make_sam(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return bsam.SAM(trained, torch.optim.AdamW, rho=0.05, lr=0.01, module=model)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def is_lora(name):
    return "lora_" in name


def inputs():
    return {"input_ids": torch.stack([sentence["input_ids"] for sentence in sentences(3)])}


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("make", [make_bsam, make_sam])
def test_the_trainer_equals_the_plain_loop(make, precision, tmp_path):
    """Accumulation, clipping, scheduler and precision. The base model stays as it is."""
    model, other = lora(), lora()
    before = weights(model)
    options = {"bf16": True} if precision else {}
    _, batches = train(tmp_path, model, make(model), sentences(), max_grad_norm=0.03, **options)
    steps = in_steps(batches, 6)
    plain_loop(other, make(other), steps, tokens_loss, num_tokens, precision, max_grad_norm=0.03)
    assert_equal_weights(model, other, rtol=1e-4, atol=1e-6)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != is_lora(name), name


@on_devices
def test_float16_equals_float32_up_to_rounding(device, tmp_path):
    model, other = lora().to(device), lora().to(device)
    options = {"use_cpu": device == "cpu"}
    optimizer = make_bsam(model)
    train(tmp_path, model, optimizer, sentences(), trainer_class=WithScaler, fp16=True, **options)
    train(tmp_path, other, make_bsam(other), sentences(), **options)
    assert optimizer.skipped_steps == 0
    assert_equal_weights(model, other, rtol=0.05, atol=5e-3)


def test_resuming_equals_no_interruption(tmp_path):
    """Bit for bit, with dropout before the adapters. The checkpoint has the adapters only."""
    whole, resumed = lora(lora_dropout=0.5), lora(lora_dropout=0.5)
    saving = {"save_strategy": "steps", "save_steps": 2}
    train(tmp_path, whole, make_bsam(whole), sentences(), **saving)
    train(tmp_path, resumed, make_bsam(resumed), sentences(), resume=str(tmp_path / "checkpoint-2"), **saving)
    assert_equal_weights(whole, resumed, rtol=0, atol=0)


def rank_trains(rank, folder):
    model = lora()
    ranks = {"ddp_backend": "gloo", "ddp_timeout": TIMEOUT, "ddp_find_unused_parameters": False}
    _, batches = train(f"{folder}/{rank}", model, make_bsam(model), sentences(16), max_steps=2, **ranks)
    torch.save({"weights": weights(model), "batches": batches}, f"{folder}/{rank}.pt")


def test_two_ranks_equal_one_process(tmp_path):
    run_two_ranks(rank_trains, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    pairs = zip(ranks[0]["batches"], ranks[1]["batches"], strict=True)
    joined = [{key: torch.cat([one[key], other[key]]) for key in one} for one, other in pairs]
    model = lora()
    plain_loop(model, make_bsam(model), in_steps(joined, 4, num_steps=2), tokens_loss, num_tokens, num_steps=2)
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], weights(model), rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- the posterior


@pytest.fixture
def trained(tmp_path):
    """A trained model and its posterior, which is saved without the frozen parameters."""
    model = lora()
    trainer, _ = train(tmp_path, model, make_bsam(model), sentences())
    posterior = trainer.posterior()
    posterior.save(tmp_path / "lora.safetensors", frozen=False)
    model.eval()
    return model, posterior, tmp_path / "lora.safetensors"


def test_the_file_has_the_trained_parameters_only(trained, tmp_path):
    model, posterior, path = trained
    assert set(bsam.load_posterior(path).mean) == {name for name in weights(model) if is_lora(name)}
    assert posterior.sampled_names == [name for name in posterior.mean if is_lora(name)]
    wide = lora(model=base(width=64))
    posterior = train(tmp_path, wide, make_bsam(wide), sentences())[0].posterior()
    for frozen, name in ((True, "all"), (False, "trained")):
        posterior.save(tmp_path / name, frozen=frozen)
    wide.save_pretrained(tmp_path / "adapter")
    adapter = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    assert (tmp_path / "trained").stat().st_size < 3 * adapter < (tmp_path / "all").stat().st_size / 10


def test_loaded_onto_a_fresh_base_model(trained):
    model, posterior, path = trained
    fresh = lora(seed=7).eval()
    loaded = bsam.load_posterior(path, model=fresh)
    expected = bsam.predict(model, posterior, inputs(), num_samples=4)
    found = bsam.predict(fresh, loaded, inputs(), num_samples=4)
    torch.testing.assert_close(found.log_probs, expected.log_probs)
    loaded.write_mean(fresh)
    assert_equal_weights(fresh, model, rtol=0, atol=0)


def test_samples_switch_adapters_only(trained):
    model, _, path = trained
    posterior = bsam.load_posterior(path, model=model)
    before = weights(model)
    versions = {name: p._version for name, p in model.named_parameters()}
    for seed in range(2):
        with posterior.sampled(model, torch.Generator().manual_seed(seed)):
            for name, p in model.named_parameters():
                assert torch.equal(p, before[name]) != is_lora(name), name
    assert all(p._version == versions[name] for name, p in model.named_parameters() if not is_lora(name))
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)


def test_other_base_weights_are_refused(trained):
    _, _, path = trained
    with pytest.raises(ValueError, match="the frozen weights of the model are not those"):
        bsam.load_posterior(path, model=lora(model=base(seed=5)))


def test_other_names(trained):
    """PEFT's wrapper adds a prefix, and the name of the adapter is a part of the names."""
    model, posterior, path = trained
    expected = bsam.predict(model, posterior, inputs(), num_samples=4).log_probs
    bare = inject_adapter_in_model(config(), base()).eval()
    loaded = bsam.load_posterior(path, model=bare, rename={"base_model.model.": ""})
    torch.testing.assert_close(bsam.predict(bare, loaded, inputs(), num_samples=4).log_probs, expected)

    other = lora(name="calibrated").eval()
    loaded = bsam.load_posterior(path, model=other, rename=lambda name: name.replace(".default.", ".calibrated."))
    assert bsam.predict(other, loaded, inputs(), num_samples=4).log_probs.isfinite().all()


def test_the_mean_is_the_adapter_that_peft_saves(trained, tmp_path):
    model, _, path = trained
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    loaded = bsam.load_posterior(path, model=again)
    assert all(torch.equal(p, loaded.mean[name]) for name, p in again.named_parameters() if is_lora(name))
