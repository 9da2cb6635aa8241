"""Finding and loading GGUF models, their options, and clear errors for everything that cannot work."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import EXACT, write_gguf, write_vocabulary

import nucleate as nc
from nucleate.models.gguf.gguf_file import find_gguf
from nucleate.models.gguf.gguf_options import GgufOptions
from nucleate.models.loader import EMBEDDED
from nucleate.models.protocol import ModelError
from nucleate.parameters.parameter import ParameterError

PROMPT = "Once upon a time"
PARAMS = nc.SamplingParams(temperature=0, max_tokens=12)


def text(model: Any, tokenizer: Any = None, **options: Any) -> str:
    """A text of a model with these options of GGUF; with one thread, as tests run in parallel."""
    return nc.LLM(model, tokenizer, gguf_options={"n_threads": 1, **options}).generate(PROMPT, PARAMS)[0].text


def test_files_folders_and_their_defaults(files: dict[str, Path], tmp_path: Path) -> None:
    expected = text(files["f32"])
    assert text(str(files["f32"])) == expected
    shutil.copy(files["f32"], tmp_path / "one.gguf")
    (tmp_path / "mmproj-vision.gguf").write_bytes(b"GGUF")
    assert text(tmp_path) == expected
    llm = nc.LLM(tmp_path)
    assert llm.folder == tmp_path / "one.gguf"
    assert llm.default_params == nc.SamplingParams(temperature=0.7, top_k=50, top_p=0.9)
    assert nc.LLM(tmp_path, generation_config="none").default_params == nc.SamplingParams()
    shutil.copy(files["f32"], tmp_path / "two.gguf")
    with pytest.raises(ModelError, match=r"has several GGUF models; choose a file: one.gguf, two.gguf"):
        nc.LLM(tmp_path)


def test_a_chat_template_beside_a_file_without_one(files: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(EMBEDDED, source)
    config = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    own = config.pop("chat_template")
    (source / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "bare").mkdir()
    bare, options = tmp_path / "bare" / "bare.gguf", {"gguf_options": {"n_threads": 1}}
    write_gguf().write(source, bare, "f32")
    assert nc.LLM(bare, **options).tokenizer.chat_template is None
    (bare.parent / "tokenizer").mkdir()
    (bare.parent / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"chat_template": own}), "utf-8")
    found = nc.LLM(bare, **options)
    assert found.tokenizer.chat_template == own
    chat = [{"role": "user", "content": "Tell me a story."}]
    assert found.chat(chat, PARAMS).prompt == nc.LLM(files["f32"], **options).chat(chat, PARAMS).prompt
    (bare.parent / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert nc.LLM(bare, **options).tokenizer.chat_template == "{{ messages[0].content }}"
    shutil.copy(files["f32"], bare)  # with a template in the file
    assert nc.LLM(bare, **options).tokenizer.chat_template == own
    write_gguf().write(source, bare, "f32")
    (bare.parent / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"cannot read the chat template beside bare\.gguf: .*not UTF-8"):
        nc.LLM(bare, **options)
    assert nc.LLM(bare, chat_template="plain", **options).chat(chat, PARAMS).prompt.endswith("Assistant:\n")


def test_split_models(files: dict[str, Path], tmp_path: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(files["f32"])
    count = len(reader.tensors)
    writer = gguf.GGUFWriter(None, "llama", split_max_tensors=count // 2 + 1)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file(tmp_path / "tiny.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [one.name for one in parts] == ["tiny-00001-of-00002.gguf", "tiny-00002-of-00002.gguf"]
    assert text(parts[0]) == text(parts[1]) == text(tmp_path) == text(files["f32"])
    parts[1].unlink()
    with pytest.raises(ModelError, match=re.escape(f"there is no file {parts[1]}")):
        nc.LLM(parts[0])


def test_bad_files(files: dict[str, Path], tmp_path: Path) -> None:
    whole = files["f32"].read_bytes()
    for name, content, match in (
        ("cut", whole[: len(whole) // 2], "llama.cpp cannot load .*(corrupted|incomplete|bounds)"),
        ("header", whole[:100], "llama.cpp cannot load .*failed to read"),
        ("foreign", b"hello, world", "is not a GGUF file"),
        ("empty", b"", "is not a GGUF file"),
        ("random", b"GGUF" + bytes(range(256)) * 9, "llama.cpp cannot load .*version"),
        ("architecture", whole.replace(b"llama", b"zzzzz", 1), "unknown model architecture: 'zzzzz'"),
    ):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=match) as error:
            nc.LLM(path)
        assert "\n" not in str(error.value)
        assert str(path) in str(error.value)
    with pytest.raises(ModelError, match=r"there is no file .*missing.gguf"):
        nc.LLM(tmp_path / "missing.gguf")
    write_vocabulary(tmp_path / "vocabulary.gguf", "llama")
    with pytest.raises(ModelError, match=r"llama.cpp cannot load .*not found"):
        nc.LLM(tmp_path / "vocabulary.gguf")


def test_options(files: dict[str, Path]) -> None:
    expected = text(files["f32"])
    for options in (
        {"n_gpu_layers": 0, "n_threads": 2},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on", "n_ctx": 512},
        {"cache_type_k": "bf16", "n_seq_max": 64},
        {"prefix_cache_tokens": 0},
    ):
        assert text(files["f32"], **options)[:20] == expected[:20]
    assert nc.LLM(files["f32"], gguf_options=GgufOptions(n_ctx=512)).new_engine().stats.num_kv_blocks == 32
    for name, value, match in (
        ("n_gpu_layers", -2, r"an integer in -1\.\.2147483647, got -2"),
        ("n_gpu_layers", None, "an integer"),
        ("n_ctx", 0, r"an integer in 1\.\."),
        ("n_threads", True, "an integer"),
        ("n_threads", 1 << 40, "an integer"),
        ("cache_type_k", "q3", "one of f32, f16, bf16"),
        ("cache_type_v", 8, "one of f32"),
        ("flash_attn", True, "one of auto, off, on"),
        ("layers", 3, "gguf_options: unknown parameter 'layers'; did you mean n_gpu_layers"),
    ):
        with pytest.raises(ParameterError, match=match):
            nc.LLM(files["f32"], gguf_options={name: value})
    with pytest.raises(ParameterError, match="must be a GgufOptions or a dict"):
        nc.LLM(files["f32"], gguf_options=3)
    with pytest.raises(ParameterError, match="gguf_options needs a GGUF model"):
        nc.LLM(gguf_options={"n_ctx": 512})
    with pytest.raises(ModelError, match=r"llama.cpp cannot run .*"):
        nc.LLM(files["f32"], gguf_options={"cache_type_v": "q8_0", "flash_attn": "off"}).generate(PROMPT, PARAMS)


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "float16"), ("runtime", "torch"), ("revision", "main"), ("device", "tpu")]
)
def test_arguments_of_folders(files: dict[str, Path], name: str, value: str) -> None:
    with pytest.raises(ParameterError, match=name):
        nc.LLM(files["f32"], **{name: value})


def test_devices(files: dict[str, Path]) -> None:
    assert nc.LLM(files["f32"], device="cpu").model.options.n_gpu_layers == 0
    with pytest.raises(ModelError, match="device cuda needs a build of llama-cpp-python for GPUs"):
        nc.LLM(files["f32"], device="cuda")


def test_a_context_larger_than_memory(files: dict[str, Path]) -> None:
    with pytest.raises(
        ModelError, match=r"a KV cache of 1073741824 tokens needs 1572864 MiB, but only \d+ MiB are free"
    ):
        nc.LLM(files["f32"], gguf_options={"n_ctx": 1 << 30}).generate(PROMPT, PARAMS)
    with pytest.raises(ModelError, match="the KV cache needs at least"):
        nc.LLM(files["f32"], kv_cache_memory=100).generate(PROMPT, PARAMS)


@pytest.mark.slow
def test_a_tiny_context_and_long_batches(files: dict[str, Path], llm: nc.LLM) -> None:
    """Fewer tokens than sequences, and more tokens than llama.cpp computes at a time."""
    tiny = nc.LLM(files["f32"], gguf_options={"n_ctx": 16}).new_engine(max_num_seqs=4)
    assert tiny.stats.num_kv_blocks == 1
    for number in range(40):  # more than there are numbers of sequences
        tiny.add(nc.Request([5, 6, 7 + number], nc.SamplingParams(max_tokens=4, ignore_eos=True)))
    reasons = [output.chunk.finish_reason for _ in range(400) for output in tiny.step() if output.finished]
    assert reasons == ["length"] * 40
    exact = nc.LLM(files["f32"], gguf_options=EXACT)
    wanted = nc.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [[(i * 7 + j) % 4096 for j in range(900)] for i in range(3)]
    found, expected = [], []
    for one, logprobs in ((exact, found), (llm, expected)):
        engine = one.new_engine(max_num_batched_tokens=3000)
        for prompt in prompts:
            engine.add(nc.Request(prompt, wanted))
        while len(engine):
            for output in engine.step():
                for step in (output.chunk.prompt_logprobs or ())[1:]:
                    logprobs.append(step.chosen.logprob)
    assert len(found) == 3 * 899
    assert np.abs(np.subtract(sorted(found), sorted(expected))).max() < 1e-4


def test_a_request_longer_than_the_context(files: dict[str, Path]) -> None:
    with pytest.raises(ParameterError, match="1024"):
        nc.LLM(files["f32"]).generate([[5] * 1024], PARAMS)


def test_another_tokenizer_and_other_vocabularies(files: dict[str, Path], tmp_path: Path) -> None:
    assert text(files["f32"], EMBEDDED) == text(files["f32"])
    folder = tmp_path / "other"
    shutil.copytree(EMBEDDED, folder)
    changed = (folder / "tokenizer.json").read_text("utf-8").replace('"Ġdog":', '"Ġdgo":')
    (folder / "tokenizer.json").write_text(changed, "utf-8")
    other = tmp_path / "other.gguf"
    write_gguf().write(folder, other)
    draft = {"method": "draft", "model": other}
    with pytest.raises(ModelError, match="the draft model must have the vocabulary of the model; it has other tokens"):
        nc.LLM(files["f32"], speculative_config=draft)
    with pytest.raises(ModelError, match="the companion model must have the vocabulary of the model"):
        nc.LLM(files["f32"], companion_model=other)
    with pytest.raises(ModelError, match="draft weights for 'eagle' are for the embedded model on the numpy runtime"):
        nc.LLM(files["f32"], speculative_config="eagle").generate(PROMPT, PARAMS)


def test_names_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, Path]) -> None:
    import huggingface_hub

    names = ["README.md", "tiny-Q4_K_M.gguf", "big/x-Q8_0-00001-of-00002.gguf", "big/x-Q8_0-00002-of-00002.gguf"]
    asked: list[Any] = []

    def download(name: str, revision: str | None = None, **options: Any) -> str:
        asked.append((name, revision, options))
        for one in options.get("allow_patterns", ()):
            (tmp_path / one).parent.mkdir(exist_ok=True)
            shutil.copy(files["f32"], tmp_path / one)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda _self, _name, revision=None: names)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_gguf("owner/name:q4_k_m") == tmp_path / "tiny-Q4_K_M.gguf"
    assert asked == [("owner/name", None, {"allow_patterns": ["tiny-Q4_K_M.gguf"]})]
    assert find_gguf("owner/name:Q8_0", "v1") == tmp_path / "big/x-Q8_0-00001-of-00002.gguf"
    assert asked[1] == ("owner/name", "v1", {"allow_patterns": names[2:]})
    with pytest.raises(
        ModelError, match=r"has no GGUF model 'Q5_0'; it has x-Q8_0-00001-of-00002.gguf, tiny-Q4_K_M.gguf"
    ):
        find_gguf("owner/name:Q5_0")

    def offline(*_: Any, **__: Any) -> None:
        raise OSError("offline mode is enabled\nset HF_HUB_OFFLINE=0")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", offline)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    cache = tmp_path / "cache" / "models--owner--name"
    for revision, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / revision).write_text(commit)
        shutil.copy(files["f32"], cache / "snapshots" / commit / f"tiny-Q4_K_M-{revision}.gguf")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name, given, commit in (("main", None, "a"), ("v1", "v1", "b"), ("v1", "b" * 40, "b")):
        found = find_gguf(f"owner/name:Q4_K_M-{name}", given)
        assert found == cache / "snapshots" / (commit * 40) / f"tiny-Q4_K_M-{name}.gguf"
    with pytest.raises(
        ModelError, match=r"owner/name:Q4_K_M is not cached, and the hub failed: offline mode is enabled$"
    ):
        find_gguf("owner/name:Q4_K_M")


def test_other_models_are_not_gguf(tmp_path: Path) -> None:
    for model in (EMBEDDED, "owner/name", tmp_path, "no such folder", "a:b"):
        assert find_gguf(model) is None


def test_without_llama_cpp_python(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from nucleate.models.gguf.llama_library import llama_cpp

    llama_cpp.cache_clear()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ModelError, match=r"GGUF models need llama-cpp-python .*: pip install -e '\.\[gguf\]'"):
        nc.LLM(files["f32"])
    monkeypatch.undo()
    assert text(files["f32"])


def test_its_log_is_ours(files: dict[str, Path], caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    with caplog.at_level(logging.DEBUG, logger="nucleate.llama_cpp"):
        nc.LLM(files["f32"])
    assert any("llama_model_loader" in record.message for record in caplog.records)
    assert capfd.readouterr() == ("", "")


def test_a_model_is_freed(files: dict[str, Path]) -> None:
    import gc

    def open_files() -> int:
        return sum(str(files["q8_0"]) in line for line in Path("/proc/self/maps").read_text().splitlines())

    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    assert files["q8_0"].exists()
    llm = nc.LLM(files["q8_0"], gguf_options=EXACT)
    llm.generate(PROMPT, PARAMS)
    assert open_files()
    del llm
    gc.collect()
    assert not open_files()
