"""Losses found in Dynamo's graphs of many models, rewritten, traced, partitioned and compiled."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch.fx import GraphModule

from remat.inductor.loss.chunked import chunked_linear_cross_entropy
from remat.inductor.loss.marks import mark_saved
from remat.inductor.loss.rewrite import Kept, LossRegion, Rewritten, chunks_for, find_losses, rewrite_loss
from remat.pytorch._compat.dynamo import aot_autograd, log_messages_skipped

ROWS, VOCABULARY, WIDTH = 30, 43, 16


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch.compiler.reset()


def compiled(step: Any, chunks: int = 4, compile_graph: Any = None) -> tuple[Any, list[Any]]:
    """`step` with its losses rewritten, and the results of rewriting."""
    results: list[Any] = []

    def backend(module: GraphModule, inputs: list[Any]) -> Any:
        results.extend(rewrite_loss(module, chunks))
        return module if compile_graph is None else compile_graph(module, inputs)

    return torch.compile(step, backend=backend), results


def boxed(module: GraphModule, _: Any) -> Any:
    return make_boxed_func(module.forward)


def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, WIDTH, generator=generator) for size in (ROWS, VOCABULARY))
    return hidden.view(5, 6, WIDTH).requires_grad_(), weight.requires_grad_()


def some_labels() -> Tensor:
    labels = torch.randint(VOCABULARY, (5, 6), generator=torch.Generator().manual_seed(1))
    labels[0, :2] = -100
    return labels


def assert_same(step: Callable[..., Tensor], rewritten: Callable[..., Tensor], *args: Tensor, bits: int = 20) -> None:
    inputs = [item for item in args if item.requires_grad]
    plain, found = step(*args), rewritten(*args)
    assert found.dtype == plain.dtype
    torch.testing.assert_close(found, plain, rtol=2.0**-bits, atol=0)
    for grad, true in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(plain, inputs), strict=True):
        assert float((grad - true).norm()) <= 2.0**-bits * float(true.norm())


def flat(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten())


def shifted(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = (hidden @ weight.t()).float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels[..., 1:].reshape(-1), reduction="sum")


def of_one_sequence(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(torch.matmul(hidden, weight.T)[1, 2:], labels[1, 2:], label_smoothing=0.1)


def divided(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    total = F.cross_entropy(F.linear(hidden, weight).view(-1, VOCABULARY), labels.view(-1), reduction="sum")
    return total / (labels != -100).sum()


def with_bias(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias=weight[:, 0]).to(torch.float64)
    return nn.CrossEntropyLoss(ignore_index=0)(logits.reshape(ROWS, -1), labels.reshape(-1).clamp(min=0)) / 2


def with_a_matrix_of_columns(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    columns = weight.t().contiguous()
    return F.cross_entropy(torch.addmm(weight[:, 0], hidden.flatten(0, 1), columns), labels.view(-1))


def of_two_heads(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return flat(hidden, weight, labels) + flat(hidden.tanh(), weight, labels)


def capped_as_by_gemma(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = torch.tanh(F.linear(hidden, weight) / 3.0) * 3.0
    return F.cross_entropy(logits.float()[:, 1:].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def scaled(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((0.25 * F.linear(hidden, weight).flatten(0, 1)).mul(2), labels.flatten())


def with_an_untrained_row(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    row = torch.linspace(-3, 3, VOCABULARY)[None].double()
    return F.cross_entropy((F.linear(hidden, weight) + row).view(-1, VOCABULARY), labels.view(-1))


def with_a_row_that_rules_out(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    row = torch.where(torch.arange(VOCABULARY) % 2 == 0, 0.0, -torch.inf)
    return F.cross_entropy((row + F.linear(hidden, weight) / 2).tanh().view(-1, VOCABULARY), labels.view(-1))


STEPS = (
    *(flat, shifted, of_one_sequence, divided, with_bias, with_a_matrix_of_columns, of_two_heads),
    *(capped_as_by_gemma, scaled, with_an_untrained_row, with_a_row_that_rules_out),
)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_rewritten_loss_has_the_same_value_and_gradients(step: Callable[..., Tensor]) -> None:
    rewritten, results = compiled(step)
    assert_same(step, rewritten, *leaves(), some_labels())
    assert results and all(isinstance(result, Rewritten) for result in results)


@pytest.mark.parametrize("outside", [True, False])
def test_autocast_is_followed_inside_and_around_the_graph(outside: bool) -> None:
    def inside(*args: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return shifted(*args)

    step = shifted if outside else inside
    rewritten, results = compiled(step, compile_graph=aot_autograd(fw_compiler=boxed))
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        assert_same(step, rewritten, *leaves(), some_labels(), bits=7)
    assert results[0].region == LossRegion(25, VOCABULARY, WIDTH, torch.bfloat16)


def logits_returned(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def logits_used(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten()) + 1e-4 * logits.logsumexp(-1).pow(2).mean()


def one_loss_for_each_row(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="none")


def soft_labels(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).flatten(0, 1)
    return F.cross_entropy(logits, torch.full_like(logits, 1 / VOCABULARY))


def class_weights(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), weight=weight[:, 0].detach().exp())


def clamped(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).relu(), labels.flatten())


def with_a_trained_row(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((F.linear(hidden, weight) + weight[:, 0]).flatten(0, 1), labels.flatten())


def with_two_rows(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    row = torch.ones(VOCABULARY)
    return F.cross_entropy((F.linear(hidden, weight) + row + row).flatten(0, 1), labels.flatten())


def with_a_trained_scale(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((F.linear(hidden, weight) * weight[0, 0]).flatten(0, 1), labels.flatten())


def squared(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).flatten(0, 1)
    return F.cross_entropy(logits * logits, labels.flatten())


def some_classes(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight)[..., :9].flatten(0, 1), labels.clamp(0, 8).flatten())


def rounded(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).bfloat16(), labels.flatten())


def classes_in_the_middle(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).transpose(1, 2), labels)


def no_linear_layer(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden.flatten(0, 1), labels.flatten().clamp(0, 15))


def frozen_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + hidden.sum()


def changed_in_between(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    hidden = hidden * 2
    logits = F.linear(hidden, weight)
    hidden.zero_()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


REASONS = {
    logits_returned: "the logits are returned; return only the loss to save 5.04 KiB",
    logits_used: "the logits are also used by",
    one_loss_for_each_row: "the loss is not reduced to one number",
    soft_labels: "the logits are also used by",
    class_weights: "the loss weighs its classes",
    clamped: "`relu` stands between the linear layer and the loss",
    with_a_trained_row: "stands between the linear layer and the loss",
    with_two_rows: "two tensors are added to the logits",
    with_a_trained_scale: "`mul` stands between the linear layer and the loss",
    squared: "`mul` stands between the linear layer and the loss",
    some_classes: "stands between the linear layer and the loss",
    rounded: "the logits are rounded before the loss",
    classes_in_the_middle: "`transpose` stands between the linear layer and the loss",
    no_linear_layer: "the logits do not come from a linear layer of this graph",
    frozen_logits: "gradients are switched off for the linear layer alone",
    changed_in_between: "changes a tensor between the linear layer and the loss",
}


@pytest.mark.parametrize("step", REASONS, ids=lambda step: step.__name__)
def test_what_cannot_be_chunked_is_kept_and_says_why(step: Callable[..., Any]) -> None:
    rewritten, results = compiled(step)
    hidden, weight = leaves()
    rewritten(hidden, weight, some_labels())
    (kept,) = results
    assert isinstance(kept, Kept) and REASONS[step] in kept.reason


def test_small_logits_are_left_alone() -> None:
    rewritten, results = compiled(flat, chunks=chunks_for)
    rewritten(*leaves(), some_labels())
    assert results == [Kept("logits of 5.04 KiB are not worth chunks")]


def test_finding_changes_nothing_and_tells_the_bytes() -> None:
    graphs: list[GraphModule] = []

    def backend(module: GraphModule, _: Any) -> Any:
        before = str(module.graph)
        (found,) = find_losses(module)
        assert not isinstance(found, Kept) and str(module.graph) == before
        assert found.region.logits_bytes == ROWS * VOCABULARY * 4
        assert found.region.chunk_bytes(4) == 8 * VOCABULARY * 4
        graphs.append(module)
        return module

    torch.compile(flat, backend=backend)(*leaves(), some_labels())
    assert graphs


@pytest.mark.parametrize("name", ["gpt", "bert", "llama"])
def test_losses_of_the_zoo_are_rewritten(name: str) -> None:
    family = importlib.import_module(f"remat.zoo.{name}")
    sizes = {**family.SIZES["tiny"], "depth": 1, "batch": 2}
    sizes.update({"dropout": 0.0} if "dropout" in sizes else {})
    example = family.example(**sizes)
    rewritten, results = compiled(example.model)
    plain = example.model(*example.args, **example.kwargs)
    torch.testing.assert_close(rewritten(*example.args, **example.kwargs), plain)
    assert [type(result) for result in results] == [Rewritten]


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    ids = dict(bos_token_id=1, eos_token_id=1, pad_token_id=0)
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, **ids)
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_key_value_heads=2, **ids))
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**small))
    if name == "gemma2":
        return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**small, num_key_value_heads=2, **ids))
    if name == "bart":
        halves = ("encoder", "decoder")
        sizes = {f"{half}_{what}": size for half in halves for what, size in (("layers", 1), ("ffn_dim", 32))}
        return transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=64, d_model=16, **sizes))
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("name", "items"),
    [
        *(("gpt2", None), ("gpt2", 11), ("llama", None), ("llama", 11)),
        *(("bert", None), ("t5", None), ("bart", None), ("gemma2", None)),
    ],
)
def test_losses_of_transformers_are_rewritten(name: str, items: int | None) -> None:
    model = hugging_face(name).eval()
    tokens = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    batch: dict[str, Any] = dict(input_ids=tokens, labels=tokens, use_cache=False)
    if name == "bert":
        del batch["use_cache"]
    if items is not None:
        batch["num_items_in_batch"] = torch.tensor(items)

    def step() -> Tensor:
        return model(**batch).loss

    rewritten, results = compiled(step)
    with log_messages_skipped():
        torch.testing.assert_close(rewritten(), step())
    assert [type(result) for result in results] == [Rewritten]


def joint_graph(step: Callable[..., Tensor], chunks: int) -> GraphModule:
    joints: list[GraphModule] = []

    def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        joints.append(joint)
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    backend = aot_autograd(fw_compiler=boxed, partition_fn=partition)
    rewritten, _ = compiled(step, chunks, backend)
    rewritten(*leaves(), some_labels()).backward()
    return joints[0]


def test_marks_the_finished_gradients_of_every_loss() -> None:
    joint = joint_graph(of_two_heads, chunks=3)
    marked = mark_saved(joint)
    shapes = sorted(tuple(node.meta["val"].shape) for node in marked)
    assert shapes == [(ROWS, WIDTH)] * 2 + [(VOCABULARY, WIDTH)] * 2
    assert all(str(node.meta["recompute"]).endswith("MUST_SAVE") for node in marked)
    assert mark_saved(joint) == marked


def test_marks_nothing_where_no_loss_was_rewritten() -> None:
    assert mark_saved(joint_graph(flat, chunks=0)) == []


def sizes_in(code: str) -> set[int]:
    """Elements of every buffer that generated code allocates."""
    shapes = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", code)
    return {int(torch.Size([int(size) for size in shape.split(",") if size.strip()]).numel()) for shape in shapes}


def marking_partitioner() -> Any:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Marking(CustomPartitionerFn):
        """Torch's own partitioner; remembers what was marked and saved."""

        saved_shapes: set[tuple[int, ...]]

        def __call__(self, joint: GraphModule, inputs: Any, **options: Any) -> Any:
            marked = {node.name for node in mark_saved(joint)}
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
            (outputs,) = forward.graph.find_nodes(op="output")[0].args
            saved = [node for node in outputs if node.name in marked]
            self.saved_shapes = {tuple(node.meta["val"].shape) for node in saved}
            assert len(saved) == len(marked)
            return forward, backward

        def uuid(self) -> None:
            return None

    return Marking()


def test_compiled_code_never_holds_all_logits() -> None:
    """Torch's own partitioner decides; with so few rows it would rather save the logits than the gradients."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.utils import run_fw_bw_and_get_code

    def step(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(F.linear(hidden.tanh(), weight).float(), labels)

    rows, vocabulary, width = 96, 512, 128
    hidden, weight = torch.randn(rows, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.randint(vocabulary, (rows,))
    partitioner = marking_partitioner()
    patches = {"custom_partitioner_fn": partitioner}
    rewritten, results = compiled(step, 4, functools.partial(compile_fx, config_patches=patches))
    _, codes = run_fw_bw_and_get_code(lambda: rewritten(hidden, weight, labels))
    found, hidden.grad, weight.grad = (hidden.grad, weight.grad), None, None
    step(hidden, weight, labels).backward()
    for grad, true in zip(found, (hidden.grad, weight.grad), strict=True):
        assert float((grad - true).norm()) < 2.0**-7 * float(true.norm())
    assert results == [Rewritten(LossRegion(rows, vocabulary, width, torch.bfloat16), 4)]
    assert partitioner.saved_shapes == {(rows, width), (vocabulary, width)}
    forward, backward = codes
    assert rows * vocabulary not in sizes_in(forward) | sizes_in(backward)
    assert rows * vocabulary // 4 in sizes_in(forward) and rows * vocabulary // 4 not in sizes_in(backward)
    assert "mm" not in backward.partition("def call")[2]
    assert forward.count("torch.ops.remat.add_linear_grads") == 4


def test_rewritten_call_stands_where_the_loss_stood() -> None:
    seen: list[GraphModule] = []
    rewritten, _ = compiled(flat, 2, lambda module, _: seen.append(module) or module)
    rewritten(*leaves(), some_labels())
    targets = [node.target for node in seen[0].graph.nodes if node.op == "call_function"]
    assert targets == [chunked_linear_cross_entropy]
