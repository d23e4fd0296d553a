"""The Trainer of transformers, on tiny models made from configs."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import torch.nn.functional as F
import transformers
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import bsam
from bsam.integrations.transformers import ProbingTrainer, Trainer
from tests.integrations.devices import on_devices
from tests.integrations.two_processes import TIMEOUT, run_two_ranks

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
VOCABULARY = 16


def llama(dropout=0.0):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, attention_dropout=dropout, **sizes)
    return LlamaForCausalLM(config)


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=3, **sizes, **dropout))


def sentences(num=12, ignored=5):
    """Examples that differ in their number of labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (num, 8), generator=generator)
    labels = ids.clone()
    for i in range(num):
        labels[i, : i % ignored] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


def classes(num=11):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (num, 8), generator=generator)
    return [{"input_ids": x, "labels": torch.tensor(i % 3)} for i, x in enumerate(ids)]


def make_bsam(model, **options):
    return bsam.BSAM(model.parameters(), lr=0.1, num_data=84, rho=0.05, module=model, **options)


def make_sam(model, **options):
    return bsam.SAM(model.parameters(), torch.optim.AdamW, rho=0.05, lr=0.01, module=model, **options)


class Recording:
    """A collator that remembers the batches, in their order."""

    def __init__(self):
        self.batches = []

    def __call__(self, examples):
        batch = {key: torch.stack([example[key] for example in examples]) for key in examples[0]}
        self.batches.append({key: value.clone() for key, value in batch.items()})
        return batch


class Recorded:
    """A collator that gives recorded batches, whatever the examples."""

    def __init__(self, batches):
        self.batches = iter(batches)

    def __call__(self, examples):
        return next(self.batches)


def arguments(folder, **options):
    usual = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5, "max_grad_norm": 0.5}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
    return transformers.TrainingArguments(output_dir=str(folder), **{**usual, **quiet, **options})


def train(folder, model, optimizer, data, trainer_class=Trainer, resume=None, trainer_options=None, **options):
    collator = Recording()
    usual = {"data_collator": collator, "train_dataset": data, "optimizers": (optimizer, None)}
    trainer = trainer_class(model, arguments(folder, **options), **{**usual, **(trainer_options or {})})
    trainer.train(resume_from_checkpoint=resume)
    return trainer, collator.batches


def tokens_loss(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits.float()
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1))


def num_tokens(batch):
    return float((batch["labels"][:, 1:] != -100).sum())


def class_loss(model, batch):
    return F.cross_entropy(model(input_ids=batch["input_ids"]).logits.float(), batch["labels"])


def plain_loop(model, optimizer, steps, loss_fn, weight, precision=None, max_grad_norm=0.5, num_steps=5):
    """What the Trainer must equal: probes, clipping, a step, a linear schedule; returns the losses."""
    scheduler = transformers.get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=num_steps)
    losses = []
    model.train()

    def loss_of(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            return loss_fn(model, batch)

    for micro_batches in steps:
        total = sum(weight(batch) for batch in micro_batches)
        loss = 0.0
        for batch in micro_batches:
            loss += float(optimizer.probe(loss_of, batch, weight=weight(batch))) * weight(batch) / total
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss)
    return losses


def assert_equal_weights(model, other, **tolerance):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def in_steps(batches, per_epoch, accumulated=2, num_steps=5):
    """Cut the batches of all epochs into steps, as the Trainer does: the last step of an epoch may be short."""
    epochs = [batches[i : i + per_epoch] for i in range(0, len(batches), per_epoch)]
    return [epoch[i : i + accumulated] for epoch in epochs for i in range(0, len(epoch), accumulated)][:num_steps]


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("make", [make_bsam, make_sam])
def test_the_trainer_equals_the_plain_loop(make, precision, tmp_path):
    """Accumulation, clipping, scheduler and precision; every token counts once."""
    model, other = llama(), llama()
    options = {"bf16": True} if precision else {}
    trainer, batches = train(tmp_path, model, make(model), sentences(), **options)
    losses = plain_loop(other, make(other), in_steps(batches, 6), tokens_loss, num_tokens, precision)
    assert_equal_weights(model, other, rtol=1e-4, atol=1e-6)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, abs=1e-3)


def test_examples_count_once_in_a_classifier(tmp_path):
    """The last micro-batch of an epoch has one example, and the last step has one short accumulation."""
    model, other = bert(), bert()
    _, batches = train(tmp_path, model, make_bsam(model), classes(9), max_steps=5)
    steps = in_steps(batches, 5)
    plain_loop(other, make_bsam(other), steps, class_loss, lambda batch: float(len(batch["labels"])))
    assert_equal_weights(model, other, rtol=1e-4, atol=1e-6)


def test_parts_of_a_micro_batch_count_every_token_once(tmp_path):
    model, other = llama(), llama()
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    _, batches = train(tmp_path, model, make_sam(model, splits=2, vectorise=False), sentences(), **options)
    halves = [[{k: v[:2] for k, v in b.items()}, {k: v[2:] for k, v in b.items()}] for b in batches]
    plain_loop(other, make_sam(other), halves[:5], tokens_loss, num_tokens)
    assert_equal_weights(model, other, rtol=1e-4, atol=1e-6)


def test_a_micro_batch_without_labels_adds_nothing(tmp_path):
    ignored = {"input_ids": torch.ones(8, dtype=torch.long), "labels": torch.full((8,), -100)}
    data = [*sentences(1), ignored]
    model, other = llama(), llama()
    options = {"per_device_train_batch_size": 1, "max_steps": 1}
    train(tmp_path, model, make_bsam(model), data, **options)
    batch = {key: value[None] for key, value in data[0].items()}
    plain_loop(other, make_bsam(other), [[batch]], tokens_loss, num_tokens)
    assert_equal_weights(model, other, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="all labels of a step are -100"):
        train(tmp_path, model, make_bsam(model), [ignored, ignored], **options)


def test_own_losses(tmp_path):
    """`compute_loss_func` divides by the number of items that it is given, and takes the labels out of the batch."""

    def loss_of(outputs, labels, num_items_in_batch):
        logits = outputs.logits[:, :-1].reshape(-1, VOCABULARY).float()
        return F.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch

    model, other = llama(), llama()
    options = {"trainer_options": {"compute_loss_func": loss_of}}
    _, batches = train(tmp_path, model, make_bsam(model), sentences(), **options)
    plain_loop(other, make_bsam(other), in_steps(batches, 6), tokens_loss, num_tokens)
    assert_equal_weights(model, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make_data", [sentences, classes])
def test_a_loss_that_is_divided_by_the_number_of_micro_batches(make_data, tmp_path):
    """transformers says it so: `loss_is_scaled_for_ga = True`. One step is then that of the mean of the losses."""
    make_model, loss_of = (llama, tokens_loss) if make_data is sentences else (bert, class_loss)

    class Divided(Trainer):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss_of(model, inputs) / self.current_gradient_accumulation_steps

    def log_of(trainer_class, make):
        model = make_model()
        options = {"max_steps": 1, "max_grad_norm": 1e9}
        trainer, batches = train(tmp_path, model, make(model), make_data(), trainer_class, **options)
        return model, trainer.state.log_history[0], batches[:2]

    _, log, batches = log_of(Divided, make_sam)
    losses = [loss_of(make_model(), batch).item() for batch in batches]
    assert log["loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)  # the log has four digits

    class DividedHere(Divided, transformers.Trainer):
        training_step = transformers.Trainer.training_step
        create_optimizer = transformers.Trainer.create_optimizer

    def make_without_perturbation(model):
        return bsam.SAM([{"params": list(model.parameters()), "perturb": False}], torch.optim.SGD, rho=0.05, lr=0.1)

    model, log, _ = log_of(Divided, make_without_perturbation)
    other, theirs, _ = log_of(DividedHere, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert log["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert_equal_weights(model, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_checkpointing": True}])
@pytest.mark.parametrize("make", [make_bsam, make_sam])
def test_resuming_equals_no_interruption(make, options, tmp_path):
    """Bit for bit, in the middle of an epoch, with dropout."""
    whole, resumed = llama(dropout=0.5), llama(dropout=0.5)
    optimizer, later = make(whole), make(resumed)
    saving = {"save_strategy": "steps", "save_steps": 2, **options}
    train(tmp_path, whole, optimizer, sentences(), **saving)
    train(tmp_path, resumed, later, sentences(), resume=str(tmp_path / "checkpoint-2"), **saving)
    assert_equal_weights(whole, resumed, rtol=0, atol=0)
    state, state_later = optimizer.state_dict()["state"], later.state_dict()["state"]
    assert state.keys() == state_later.keys()
    for key in state:
        assert all(torch.equal(state[key][name], state_later[key][name]) for name in state[key])


def test_the_posterior_is_that_of_the_best_model(tmp_path):
    model = llama()
    optimizer = make_bsam(model, betas=(0.9, 0.1), max_noise=None)  # a posterior after two steps
    choosing = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    data = {"trainer_options": {"eval_dataset": sentences(2)}}
    trainer, _ = train(tmp_path, model, optimizer, sentences(), max_steps=4, **choosing, **saving, **data)
    best = torch.load(f"{trainer.state.best_model_checkpoint}/optimizer.pt", weights_only=True)["state"]
    posterior = trainer.posterior()
    expected = [84 * state["unit_precision"] for state in best.values()]
    for value, std in zip(expected, posterior.std.values(), strict=True):
        torch.testing.assert_close(std, value.rsqrt())


def test_a_model_that_the_trainer_makes(tmp_path):
    settings = {"lr": 0.1, "num_data": 84, "rho": 0.05, "betas": (0.9, 0.5)}
    trainer = Trainer(
        args=arguments(tmp_path, seed=3),
        model_init=lambda: llama(),
        train_dataset=sentences(),
        optimizer_cls_and_kwargs=(bsam.BSAM, settings),
    )
    trainer.train()
    assert isinstance(trainer.posterior(), bsam.DiagonalGaussian)


def test_the_training_step_goes_into_other_trainers(tmp_path):
    class Own(ProbingTrainer, transformers.Seq2SeqTrainer):
        pass

    model, other = llama(), llama()
    options = transformers.Seq2SeqTrainingArguments(
        **{k: v for k, v in arguments(tmp_path).to_dict().items() if k in ("output_dir", "max_steps", "report_to")},
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
    )
    collator = Recording()
    own = {"data_collator": collator, "optimizers": (make_bsam(model), None)}
    Own(model, options, train_dataset=sentences(), **own).train()
    plain_loop(other, make_bsam(other), in_steps(collator.batches, 6), tokens_loss, num_tokens)
    assert_equal_weights(model, other, rtol=1e-4, atol=1e-6)


class Images(Recording):
    """A collator whose batches have tensors of another length, as for texts with images."""

    def __call__(self, examples):
        return {**super().__call__(examples), "images": torch.ones(7, 3)}


class WithImages(Trainer):
    def compute_loss(self, model, inputs, **options):
        assert inputs.pop("images").shape == (7, 3)
        return super().compute_loss(model, inputs, **options)


def test_texts_with_images(tmp_path):
    model, other, collator = llama(), llama(), Images()
    images = {"trainer_options": {"data_collator": collator}, "remove_unused_columns": False}
    train(tmp_path, model, make_bsam(model), sentences(), trainer_class=WithImages, **images)
    plain_loop(other, make_bsam(other), in_steps(collator.batches, 6), tokens_loss, num_tokens)
    assert_equal_weights(model, other, rtol=1e-4, atol=1e-6)


def test_label_smoothing(tmp_path):
    """The parts of a micro-batch, too, count every token once."""

    def loss_fn(model, batch):
        logits = model(input_ids=batch["input_ids"]).logits.float()[:, :-1].reshape(-1, VOCABULARY)
        return F.cross_entropy(logits, batch["labels"][:, 1:].reshape(-1), label_smoothing=0.1)

    model, other = llama(), llama()
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "label_smoothing_factor": 0.1}
    _, batches = train(tmp_path, model, make_sam(model, splits=2, vectorise=False), sentences(), **options)
    halves = [[{k: v[:2] for k, v in b.items()}, {k: v[2:] for k, v in b.items()}] for b in batches]
    plain_loop(other, make_sam(other), halves[:5], loss_fn, num_tokens)
    assert_equal_weights(model, other, rtol=1e-4, atol=1e-6)


class Interrupting(transformers.TrainerCallback):
    """Acts between the micro-batches of the second step: it stops training and saves, or raises."""

    def __init__(self, error=None):
        self.error = error

    def on_substep_end(self, args, state, control, **options):
        if state.global_step == 1:
            if self.error:
                raise self.error
            control.should_training_stop = control.should_save = True


@pytest.mark.parametrize("make", [make_bsam, make_sam])
def test_a_stop_between_micro_batches_is_saved_and_resumed_at_the_first(make, tmp_path):
    whole, resumed = llama(), llama()
    train(tmp_path / "whole", whole, make(whole), sentences())
    stopped = llama()
    saving = {"save_strategy": "steps", "save_steps": 100}
    stop = {"trainer_options": {"callbacks": [Interrupting()]}}
    train(tmp_path, stopped, make(stopped), sentences(), **saving, **stop)
    train(tmp_path, resumed, make(resumed), sentences(), resume=str(tmp_path / "checkpoint-1"), **saving)
    assert_equal_weights(whole, resumed, rtol=0, atol=0)


def test_training_goes_on_after_a_failure_between_micro_batches(tmp_path):
    model = llama()
    optimizer = make_bsam(model)
    failing = {"trainer_options": {"callbacks": [Interrupting(KeyboardInterrupt())]}}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, model, optimizer, sentences(), **failing)
    trainer, _ = train(tmp_path, model, optimizer, sentences())
    assert trainer.state.global_step == 5


# ---------------------------------------------------------------- errors


def test_the_posterior_before_there_is_an_optimizer(tmp_path):
    with pytest.raises(RuntimeError, match=r"call train\(\) first"):
        Trainer(llama(), arguments(tmp_path), train_dataset=sentences()).posterior()


def test_without_an_optimizer(tmp_path):
    with pytest.raises(ValueError, match=r"write Trainer\(\.\.\., optimizers=\(bsam\.BSAM\("):
        Trainer(llama(), arguments(tmp_path), train_dataset=sentences()).train()


def test_with_an_optimizer_of_torch(tmp_path):
    model = llama()
    with pytest.raises(TypeError, match=r"SGD has no probe: make an optimizer of bsam"):
        train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), sentences())


def test_with_the_trainer_of_transformers(tmp_path):
    model = llama()
    with pytest.raises(TypeError, match=r"bsam\.integrations"):
        train(tmp_path, model, make_bsam(model), sentences(), trainer_class=transformers.Trainer)


def test_the_best_weights_with_the_last_precision_are_refused(tmp_path):
    model = llama()
    choosing = {"load_best_model_at_end": True, "save_only_model": True, "save_strategy": "steps", "save_steps": 2}
    data = {"eval_strategy": "steps", "eval_steps": 2, "trainer_options": {"eval_dataset": sentences(2)}}
    with pytest.raises(ValueError, match="write save_only_model=False"):
        train(tmp_path, model, make_bsam(model), sentences(), **choosing, **data)


def test_several_gpus_in_one_process(tmp_path):
    model = llama()
    trainer = Trainer(model, arguments(tmp_path), train_dataset=sentences(), optimizers=(make_bsam(model), None))
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match="torchrun --nproc-per-node=2"):
        trainer.train()


# ---------------------------------------------------------------- float16


class WithScaler(Trainer):
    """Trains in float16. On the CPU Accelerate makes no scaler, so that it is given torch's.

    The gradient of one pass overflows, counted over all passes.
    """

    overflow = 0
    num_passes = 0

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler(self.args.device.type, init_scale=2.0**10)
        self.accelerator.native_amp = True

    def compute_loss(self, model, inputs, **options):
        self.num_passes += 1
        loss = super().compute_loss(model, inputs, **options)
        if self.num_passes == self.overflow:
            loss.register_hook(lambda gradient: gradient * torch.inf)
        return loss


class FirstOverflows(WithScaler):
    overflow = 1


class SecondOverflows(WithScaler):
    overflow = 2


@on_devices
@pytest.mark.parametrize("make", [make_bsam, make_sam])
def test_float16_equals_float32_up_to_rounding(make, device, tmp_path):
    model, other = llama().to(device), llama().to(device)
    on_device = {"use_cpu": device == "cpu"}
    trainer, _ = train(tmp_path, model, make(model), sentences(), trainer_class=WithScaler, fp16=True, **on_device)
    train(tmp_path, other, make(other), sentences(), **on_device)
    assert trainer.optimizer.optimizer.skipped_steps == 0
    assert_equal_weights(model, other, rtol=0.05, atol=5e-3)
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)  # float16 was used


@on_devices
@pytest.mark.parametrize("make", [make_bsam, make_sam])
@pytest.mark.parametrize("trainer_class", [FirstOverflows, SecondOverflows])
def test_an_overflow_in_one_gradient_is_skipped_and_lowers_the_scale(trainer_class, make, device, tmp_path):
    """The first of two steps is skipped. The second equals a first step, with a scale of half the size."""
    model, other = llama().to(device), llama().to(device)
    optimizer, plain = make(model), make(other)
    options = {"use_cpu": device == "cpu", "fp16": True, "lr_scheduler_type": "constant"}
    data = sentences(4)
    trainer, batches = train(tmp_path, model, optimizer, data, trainer_class=trainer_class, max_steps=2, **options)
    assert optimizer.skipped_steps == 1
    assert trainer.accelerator.scaler.get_scale() == 2.0**9
    assert trainer.num_passes == 8  # two steps of two micro-batches of two passes
    repeated = Recorded(batches[2:])
    train(
        tmp_path,
        other,
        plain,
        data,
        trainer_class=WithScaler,
        max_steps=1,
        trainer_options={"data_collator": repeated},
        **options,
    )
    assert plain.skipped_steps == 0
    assert_equal_weights(model, other, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- two processes


def rank_trains(rank, folder):
    model = llama()
    ranks = {"ddp_backend": "gloo", "ddp_timeout": TIMEOUT, "ddp_find_unused_parameters": False}
    _, batches = train(f"{folder}/{rank}", model, make_sam(model), sentences(16), max_steps=4, **ranks)
    torch.save({"weights": [p.detach() for p in model.parameters()], "batches": batches}, f"{folder}/{rank}.pt")


def test_two_ranks_equal_one_process(tmp_path):
    """Ranks have different numbers of tokens. A micro-batch is joined over the ranks, and counts by all its tokens."""
    run_two_ranks(rank_trains, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    joined = [
        {key: torch.cat([a[key], b[key]]) for key in a}
        for a, b in zip(ranks[0]["batches"], ranks[1]["batches"], strict=True)
    ]
    assert any(num_tokens(a) != num_tokens(b) for a, b in zip(*(rank["batches"] for rank in ranks), strict=True))
    other = llama()
    plain_loop(other, make_sam(other), in_steps(joined, 4, num_steps=4), tokens_loss, num_tokens, num_steps=4)
    for rank in ranks:
        for p, q in zip(rank["weights"], other.parameters(), strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=1e-4, atol=1e-6)


def test_predictions_of_a_language_model_are_of_the_next_token():
    """Labels in a dictionary are shifted as in the model's own loss, also through PEFT's wrapper; others are not."""
    from peft import LoraConfig, get_peft_model

    model = llama()
    examples = sentences()
    batch = {key: torch.stack([example[key] for example in examples]) for key in examples[0]}
    wrapped = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for each in (model, wrapped):
        own = each(**batch).loss.item()
        posterior = bsam.PointMass.from_model(each)
        assert bsam.metrics.summary(bsam.predict(each, posterior, batch), num_bootstrap=0).nll == pytest.approx(own)
        shifted = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        beside = bsam.predict(each, posterior, ({"input_ids": batch["input_ids"]}, shifted))
        assert bsam.metrics.summary(beside, num_bootstrap=0).nll == pytest.approx(own)
