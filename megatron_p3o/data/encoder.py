r"""Prompt text to token ids, by the tokenizer's chat template or as plain text.

With `data.system_prompt: null` the model sees a user turn and nothing before it. Many templates
(SmolLM2, Qwen2.5, Llama 3) print a default system turn of their own when none is given, and have
no switch for it. It is cut out of the rendered text:

    with system M:   bos <system> M <end> <user> P <end> <assistant>
    wanted:          bos                  <user> P <end> <assistant>

Everything after M and the turn end `<end>` is the wanted text. `<end>` is learned by rendering
marker texts once: it is what follows P when no generation prompt is added.
"""

from typing import TYPE_CHECKING

from jinja2 import TemplateError

from megatron_p3o.config import DataSection
from megatron_p3o.data.prompts import PromptItem
from megatron_p3o.errors import ConfigurationError, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SYSTEM_MARKER = "SYSTEM-TURN-MARKER"
_USER_MARKER = "USER-TURN-MARKER"


class PromptEncoder:
    """Encodes prompts as the model is to see them.

    Args:
        tokenizer: a transformers tokenizer.
        config: `chat`, `system_prompt` and `max_prompt_tokens` are used.

    Raises:
        ConfigurationError: `data.chat` without a chat template, or with one that fails; a system
            prompt that the template does not print, or without `data.chat`; a template whose
            default system turn cannot be told from the user turn.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", config: DataSection) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._bos = ""
        self._system_end: str | None = None
        """Turn end of the default system turn to be cut out; None when there is none."""
        if not config.chat:
            return
        if tokenizer.chat_template is None:
            raise ConfigurationError(
                "data.chat=true needs a tokenizer with a chat template, and the one of model.path "
                "has none; set data.chat=false to encode prompts as plain text"
            )
        if config.system_prompt is None:
            self._find_default_system_turn()
        else:
            self._check_system_prompt(config.system_prompt)

    def encode(self, item: PromptItem) -> tuple[int, ...]:
        """Token ids of the prompt, up to where the response starts.

        Raises:
            InputError: it has no tokens, or more than `data.max_prompt_tokens`.
        """
        if self._config.chat:
            ids = self._tokenizer(self.render(item.prompt), add_special_tokens=False)["input_ids"]
        else:
            ids = self._tokenizer(item.prompt)["input_ids"]
        limit = self._config.max_prompt_tokens
        if not 1 <= len(ids) <= limit:
            remedy = "shorten or remove it, or raise the limit" if ids else "remove it"
            raise InputError(
                f"prompt {item.prompt_id} has {len(ids)} tokens, but a prompt needs 1 to "
                f"data.max_prompt_tokens={limit}; {remedy}. It starts: {item.prompt[:60]!r}"
            )
        return tuple(ids)

    def encode_answer(self, item: PromptItem, eos_token_id: int) -> tuple[int, ...]:
        """Token ids of the item's answer and the token that ends a response."""
        ids = self._tokenizer(item.answer, add_special_tokens=False)["input_ids"]
        return (*ids, eos_token_id)

    def render(self, prompt: str) -> str:
        """The chat text of one user turn (after the configured system turn, if any) up to where
        the assistant's answer starts."""
        if self._system_end is None:
            return self._render(prompt, system=self._config.system_prompt)
        rest = self._render(prompt, system=_SYSTEM_MARKER).partition(_SYSTEM_MARKER)[2]
        return self._bos + rest.removeprefix(self._system_end)

    def _render(self, prompt: str, system: str | None, *, answer_follows: bool = True) -> str:
        turns = [] if system is None else [{"role": "system", "content": system}]
        turns.append({"role": "user", "content": prompt})
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=answer_follows
            )
        except TemplateError as error:
            roles = " and ".join(turn["role"] for turn in turns)
            raise ConfigurationError(
                f"the chat template of model.path refuses a {roles} turn: {error}; "
                "set data.system_prompt=null, or data.chat=false"
            ) from error
        assert isinstance(text, str)
        return text

    def _find_default_system_turn(self) -> None:
        plain = self._render(_USER_MARKER, system=None)
        try:
            marked = self._render(_USER_MARKER, system=_SYSTEM_MARKER)
        except ConfigurationError:
            return  # a template that refuses system turns has no default one
        before, marker, after = marked.partition(_SYSTEM_MARKER)
        # A default turn is the marked one with other words in it.
        if not marker or plain == after or not (plain.startswith(before) and plain.endswith(after)):
            return
        closed = self._render(_USER_MARKER, system=_SYSTEM_MARKER, answer_follows=False)
        turn_end = closed.rpartition(_USER_MARKER)[2]
        if not after.startswith(turn_end):
            raise ConfigurationError(
                "data.system_prompt=None: the chat template of model.path adds a system turn that "
                "cannot be told from the user turn; set data.system_prompt, or data.chat=false"
            )
        self._system_end = turn_end
        bos = self._tokenizer.bos_token or ""
        # SmolLM2's bos token also opens each of its turns; it is not a token before them.
        if before.startswith(bos) and not after.removeprefix(turn_end).startswith(bos):
            self._bos = bos

    def _check_system_prompt(self, system_prompt: str) -> None:
        if system_prompt.strip() not in self._render(_USER_MARKER, system=system_prompt):
            raise ConfigurationError(
                f"data.system_prompt={system_prompt!r} is not printed by the chat template of "
                "model.path; remove it, or put it into the prompts"
            )
