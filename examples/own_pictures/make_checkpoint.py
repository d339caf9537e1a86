"""Writes tiny-vl/, a small Qwen3-VL without weights but with tokenizer and processor, and pictures to try it on."""
# mypy: disable-error-code="no-untyped-call"

import json
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig

FOLDER, DATA, PICTURES = Path("tiny-vl"), Path("data.jsonl"), Path("pictures")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
PIXELS = {"shortest_edge": 64 * 64, "longest_edge": 512 * 512}  # of an image
PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def write_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes are tokens, besides the marks of turns and pictures."""
    bytes_of_text = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(bytes_of_text)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ("<|im_start|>", "<|im_end|>", *MARKS.values())
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE, extra_special_tokens=MARKS
    )
    fast.save_pretrained(FOLDER)
    return fast


def write_checkpoint() -> None:
    """Write config.json, tokenizer, chat template and processor as `save_pretrained` leaves them."""
    ids = write_tokenizer().get_vocab()
    images = {"image_processor_type": "Qwen2VLImageProcessor", "size": PIXELS, **PATCHES}
    videos = {"video_processor_type": "Qwen3VLVideoProcessor", "size": PIXELS, **PATCHES, "fps": 2, "max_frames": 8}
    (FOLDER / "preprocessor_config.json").write_text(json.dumps(images))
    (FOLDER / "video_preprocessor_config.json").write_text(json.dumps({**videos, "min_frames": 4}))
    Qwen3VLConfig(
        text_config={
            "vocab_size": len(ids),
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]},
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
    ).save_pretrained(FOLDER)


def write_pictures(count: int = 64) -> None:
    """Draw circles of several sizes, and ask for their diameters, a record a line; your own data has this form."""
    PICTURES.mkdir()
    with DATA.open("w") as lines:
        for number in range(count):
            width, height, diameter = 64 + 37 * number % 256, 64 + 53 * number % 256, 16 + number % 40
            image = Image.new("RGB", (width, height), "white")
            ImageDraw.Draw(image).ellipse((4, 4, 4 + diameter, 4 + diameter), fill="navy")
            image.save(PICTURES / f"{number}.png")
            turns = [("user", "<image>How wide is the circle?"), ("assistant", f"{diameter} pixels.")]
            messages = [{"role": role, "content": content} for role, content in turns]
            lines.write(json.dumps({"images": [f"pictures/{number}.png"], "messages": messages}) + "\n")


if __name__ == "__main__":
    write_checkpoint()
    if not DATA.exists():
        write_pictures()
