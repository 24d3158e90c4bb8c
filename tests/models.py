"""Small models for tests, as a user would have them: unmodified, with random weights from a seed, and a batch each.

Every builder returns ``Example(model, batch)``; ``model(**batch)`` gives a loss (``.loss`` for models of transformers).
Inputs and labels are never one tensor object. The same seed gives the same weights and the same batch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, cast

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutput


class Example(NamedTuple):
    model: nn.Module
    batch: dict[str, torch.Tensor]


def _tokens(batch: int, sequence: int, vocab: int, seed: int, device: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed + 1)
    size = (batch, sequence)
    return {name: torch.randint(vocab, size, generator=random).to(device) for name in ("input_ids", "labels")}


def _seeded(build: type[nn.Module], *args: object, seed: int, device: str, training: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return build(*args).train(training)


def gpt2(
    *,
    layers: int = 2,
    hidden: int = 96,
    heads: int = 4,
    vocab: int = 96,
    dropout: float = 0.0,
    tied: bool = True,
    batch: int = 4,
    sequence: int = 16,
    seed: int = 0,
    device: str = "cpu",
    training: bool = True,
) -> Example:
    """GPT-2 with its fused ``c_attn``; ``vocab=1003`` is one that no mesh axis divides."""
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        vocab_size=vocab,
        n_positions=max(64, sequence),
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model = _seeded(transformers.GPT2LMHeadModel, config, seed=seed, device=device, training=training)
    return Example(model, _tokens(batch, sequence, vocab, seed, device))


def llama(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 8,
    kv_heads: int = 4,
    intermediate: int = 128,
    vocab: int = 96,
    dropout: float = 0.0,
    tied: bool = False,
    batch: int = 4,
    sequence: int = 16,
    seed: int = 0,
    device: str = "cpu",
    training: bool = True,
) -> Example:
    """Llama: rotary positions, RMS norm, gated MLP, grouped query attention. ``dropout`` is that of attention."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=max(64, sequence),
        bos_token_id=0,
        eos_token_id=0,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model = _seeded(transformers.LlamaForCausalLM, config, seed=seed, device=device, training=training)
    return Example(model, _tokens(batch, sequence, vocab, seed, device))


def bert(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    vocab: int = 96,
    dropout: float = 0.0,
    batch: int = 4,
    sequence: int = 16,
    seed: int = 0,
    device: str = "cpu",
    training: bool = True,
) -> Example:
    """BERT with its masked language model head, an attention mask with padding, and labels of which some are ignored."""
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=2 * hidden,
        vocab_size=vocab,
        max_position_embeddings=max(64, sequence),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        use_cache=False,
    )
    model = _seeded(transformers.BertForMaskedLM, config, seed=seed, device=device, training=training)
    return Example(model, _padded(_tokens(batch, sequence, vocab, seed, device)))


def distilbert(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    vocab: int = 96,
    dropout: float = 0.0,
    batch: int = 4,
    sequence: int = 16,
    seed: int = 0,
    device: str = "cpu",
    training: bool = True,
) -> Example:
    """DistilBERT with its masked language model head; inputs as for `bert`."""
    config = transformers.DistilBertConfig(
        n_layers=layers,
        dim=hidden,
        n_heads=heads,
        hidden_dim=2 * hidden,
        vocab_size=vocab,
        max_position_embeddings=max(64, sequence),
        dropout=dropout,
        attention_dropout=dropout,
    )
    model = _seeded(transformers.DistilBertForMaskedLM, config, seed=seed, device=device, training=training)
    return Example(model, _padded(_tokens(batch, sequence, vocab, seed, device)))


def vit(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    image: int = 16,
    patch: int = 4,
    classes: int = 8,
    dropout: float = 0.0,
    batch: int = 4,
    seed: int = 0,
    device: str = "cpu",
    training: bool = True,
) -> Example:
    """ViT for image classification: a convolution makes the patches, a class token is concatenated."""
    config = transformers.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=2 * hidden,
        image_size=image,
        patch_size=patch,
        num_labels=classes,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = _seeded(transformers.ViTForImageClassification, config, seed=seed, device=device, training=training)
    random = torch.Generator().manual_seed(seed + 1)
    pixels = torch.randn(batch, 3, image, image, generator=random).to(device)
    return Example(model, {"pixel_values": pixels, "labels": torch.randint(classes, (batch,), generator=random).to(device)})


class TokenClassifier(nn.Module):
    """``nn.TransformerEncoder`` between an embedding and a linear head; returns the mean cross-entropy."""

    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, dropout: float, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            hidden, heads, 2 * hidden, dropout, activation="gelu", batch_first=True, norm_first=norm_first
        )
        self.embed = nn.Embedding(vocab, hidden)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.encoder(self.embed(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def nn_transformer_encoder(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    vocab: int = 96,
    dropout: float = 0.0,
    norm_first: bool = False,
    batch: int = 4,
    sequence: int = 16,
    seed: int = 0,
    device: str = "cpu",
    training: bool = True,
) -> Example:
    """torch's own encoder, with its fused ``in_proj_weight``."""
    args = (layers, hidden, heads, vocab, dropout, norm_first)
    model = _seeded(TokenClassifier, *args, seed=seed, device=device, training=training)
    return Example(model, _tokens(batch, sequence, vocab, seed, device))


def t5(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    vocab: int = 96,
    dropout: float = 0.0,
    batch: int = 4,
    sequence: int = 16,
    seed: int = 0,
    device: str = "cpu",
    training: bool = True,
) -> Example:
    """T5: as many decoder layers as encoder layers, each with the whole encoder's output; one embedding for both and for the head."""
    config = transformers.T5Config(
        num_layers=layers,
        num_decoder_layers=layers,
        d_model=hidden,
        d_kv=hidden // heads,
        d_ff=2 * hidden,
        num_heads=heads,
        vocab_size=vocab,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    model = _seeded(transformers.T5ForConditionalGeneration, config, seed=seed, device=device, training=training)
    return Example(model, _tokens(batch, sequence, vocab, seed, device))


class Translator(nn.Module):
    """``nn.Transformer`` between an embedding for both sides and a linear head; returns the mean cross-entropy."""

    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.transformer = nn.Transformer(hidden, heads, layers, layers, 2 * hidden, dropout, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, input_ids: torch.Tensor, target_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target_ids.shape[1], device=target_ids.device)
        source, target = self.embed(input_ids), self.embed(target_ids)
        hidden = self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def nn_transformer(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    vocab: int = 96,
    dropout: float = 0.0,
    batch: int = 4,
    sequence: int = 16,
    seed: int = 0,
    device: str = "cpu",
    training: bool = True,
) -> Example:
    """torch's own encoder and decoder, with a causal mask."""
    model = _seeded(Translator, layers, hidden, heads, vocab, dropout, seed=seed, device=device, training=training)
    tokens = _tokens(batch, sequence, vocab, seed, device)
    return Example(model, {**tokens, "target_ids": tokens["labels"].roll(1, 1)})


class UNet(nn.Module):
    """Convolutions down and up again, each level up with what its level down made; returns the mean squared error."""

    def __init__(self, layers: int, channels: int, width: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(layers + 1)]
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.Conv2d(b + a, a, 3, padding=1) for a, b in pairwise(widths))
        self.last = nn.Conv2d(width, channels, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        skips = [nn.functional.gelu(self.first(x))]
        for down in self.down:
            skips.append(nn.functional.gelu(down(nn.functional.avg_pool2d(skips[-1], 2))))
        y = skips.pop()
        for up in reversed(self.up):
            wide = nn.functional.interpolate(y, scale_factor=2.0, mode="nearest")
            y = nn.functional.gelu(up(torch.cat([wide, skips.pop()], dim=1)))
        return nn.functional.mse_loss(self.last(y), labels)


def unet(
    *,
    layers: int = 2,
    channels: int = 3,
    width: int = 8,
    image: int = 16,
    batch: int = 4,
    seed: int = 0,
    device: str = "cpu",
    training: bool = True,
) -> Example:
    """A toy U-Net whose skip connections cross every cut."""
    model = _seeded(UNet, layers, channels, width, seed=seed, device=device, training=training)
    random = torch.Generator().manual_seed(seed + 1)
    size = (batch, channels, image, image)
    return Example(model, {name: torch.randn(size, generator=random).to(device) for name in ("x", "labels")})


class Mlp(nn.Module):
    """Linear layers with a residual and a norm; returns the mean squared error."""

    def __init__(self, layers: int, hidden: int, intermediate: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(hidden),
                nn.Linear(hidden, intermediate),
                nn.GELU(),
                nn.Linear(intermediate, hidden),
                nn.Dropout(dropout),
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + cast(torch.Tensor, block(x))
        return nn.functional.mse_loss(x, labels)


class _Gated(nn.Module):
    """A gated unit after a norm, with its two halves in one fused weight, which tensor parallelism stores as a strided shard."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(hidden), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return x + cast(torch.Tensor, self.dropout(self.down(torch.tanh(gate) * value)))


class Speaker(nn.Module):
    """Gated units between an embedding and a head with the same weight; returns what models of transformers do."""

    def __init__(self, layers: int, hidden: int, vocab: int, dropout: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False)
        self.blocks, self.norm = nn.ModuleList(_Gated(hidden, dropout) for _ in range(layers)), nn.LayerNorm(hidden)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> CausalLMOutput:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def speaker(
    *,
    layers: int = 1,
    hidden: int = 32,
    vocab: int = 64,
    dropout: float = 0.0,
    batch: int = 8,
    sequence: int = 8,
    seed: int = 0,
    device: str = "cpu",
    training: bool = True,
) -> Example:
    """The least language model with what plans treat apart: a weight that two layers share, a fused one, a norm, dropout, labels that are
    ignored. To capture and to differentiate it takes a quarter of the time that `gpt2` takes, which counts where every rank does so."""
    model = _seeded(Speaker, layers, hidden, vocab, dropout, seed=seed, device=device, training=training)
    return Example(model, _tokens(batch, sequence, vocab, seed, device))


class _Statistics(nn.Module):
    """Convolutions between norms over the batch, which keep running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(a, width, 3, padding=1) for a in (3, width))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu(norm(convolution(x)))
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def batch_norm(*, width: int = 8, batch: int = 8, seed: int = 0, device: str = "cpu", training: bool = True) -> Example:
    """A convolutional network with batch statistics; its output is the loss."""
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.randn(batch, 3, 8, 8, generator=generator), torch.randint(10, (batch,), generator=generator)
    model = _seeded(_Statistics, width, seed=seed, device=device, training=training)
    return Example(model, {"x": x.to(device), "labels": labels.to(device)})


class Experts(nn.Module):
    """A layer of experts as GShard has it: two of them take each token, in slots that are counted along the row."""

    def __init__(self, hidden: int, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)
        self.up_bias = nn.Parameter(torch.randn(experts, 1, width))
        self.down = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, slots = self.gate.out_features, x.shape[1]
        weight, ids = self.gate(x).softmax(-1).topk(2, -1)
        chosen = nn.functional.one_hot(ids, count)  # batch, token, which of two, expert
        gates = (chosen * weight.unsqueeze(-1)).sum(2)
        taken = chosen.sum(2)
        place = (taken.cumsum(1) - 1).clamp(0, slots - 1)
        mask = (nn.functional.one_hot(place, slots) * taken.unsqueeze(-1)).to(x.dtype)
        tokens = torch.einsum("btec,btd->becd", mask, x)
        inner = nn.functional.gelu(torch.einsum("becd,edf->becf", tokens, self.up) + self.up_bias)
        outer = torch.einsum("becf,efd->becd", inner, self.down)
        return torch.einsum("btec,bte,becd->btd", mask, gates, outer)


class Mixture(nn.Module):
    """Attention and experts in every block; returns the mean cross-entropy."""

    def __init__(self, layers: int, hidden: int, heads: int, experts: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.attention = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(hidden, 2 * hidden, experts) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2 * layers))
        self.head = nn.Linear(hidden, vocab)
        self.heads = heads

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for i, (qkv, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            q, k, v = qkv(self.norms[2 * i](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + experts(self.norms[2 * i + 1](x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def mixture(
    *,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    experts: int = 4,
    vocab: int = 96,
    batch: int = 4,
    sequence: int = 8,
    seed: int = 0,
    device: str = "cpu",
    training: bool = True,
) -> Example:
    """A decoder with a mixture of experts, whose parameters are stacked."""
    model = _seeded(Mixture, layers, hidden, heads, experts, vocab, seed=seed, device=device, training=training)
    return Example(model, _tokens(batch, sequence, vocab, seed, device))


def mlp(
    *,
    layers: int = 2,
    hidden: int = 32,
    intermediate: int = 64,
    dropout: float = 0.0,
    batch: int = 8,
    seed: int = 0,
    device: str = "cpu",
    training: bool = True,
) -> Example:
    """The smallest model with repeated blocks."""
    model = _seeded(Mlp, layers, hidden, intermediate, dropout, seed=seed, device=device, training=training)
    random = torch.Generator().manual_seed(seed + 1)
    return Example(model, {name: torch.randn(batch, hidden, generator=random).to(device) for name in ("x", "labels")})


def _padded(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad the last quarter of every other row, and ignore the label there and at every third token."""
    ids, labels = batch["input_ids"], batch["labels"]
    length = ids.shape[1]
    position = torch.arange(length, device=ids.device)
    odd = torch.arange(len(ids), device=ids.device)[:, None] % 2 == 1
    mask = ~(odd & (position >= length - length // 4))
    labels = labels.masked_fill(~mask | (position % 3 == 0), -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def ragged(example: Example) -> Example:
    """The same with fewer labels row by row: the last row keeps all of them, the first none. Labels that are no tokens stay."""
    labels = example.batch["labels"]
    if labels.is_floating_point() or labels.dim() < 2:
        return example
    rows, length = labels.shape
    kept = torch.arange(rows, device=labels.device) * length // (rows - 1)
    ignored = torch.arange(length, device=labels.device) >= kept[:, None]
    return Example(example.model, {**example.batch, "labels": labels.masked_fill(ignored, -100)})
