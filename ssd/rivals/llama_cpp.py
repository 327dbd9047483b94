"""llama.cpp on the same GGUF file, through the wheel `cyllama`, which carries it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic

from cyllama.llama import llama_cpp as cpp

from ssd.rivals.messages import Decode, Decoded, Load

# Tokens of a forward, as llama.cpp has it unless told otherwise.
BATCH = 512
# It rounds contexts up to so many tokens.
BLOCK = 256

Fed = tuple[int, int, int, bool]


class LlamaCpp:
    """A model, quantised as its file is, with room for several sequences."""

    def __init__(self, asked: Load, threads: int) -> None:
        folder, file = asked.target
        if file is None:
            raise ValueError(f"target={folder!r} is no .gguf file, and llama.cpp reads nothing else")
        cpp.ggml_backend_load_all()
        cpp.disable_logging()
        settings = cpp.LlamaContextParams()
        settings.n_seq_max = asked.rows
        settings.n_ctx = asked.rows * -(-asked.length // BLOCK) * BLOCK
        settings.n_batch = BATCH
        settings.n_threads = settings.n_threads_batch = threads or settings.n_threads
        self.model = cpp.LlamaModel(str(Path(folder) / file), cpp.LlamaModelParams())
        self.context = cpp.LlamaContext(self.model, settings)
        self.rows = asked.rows

    def decode(self, asked: Decode) -> Decoded:
        """Decode prompts together, a sequence each."""
        sampler, begin = _sampler(asked), monotonic()
        self.context.kv_cache_clear()
        prompts = asked.prompts
        fed = [(token, place, row, place == len(prompt) - 1) for row, prompt in enumerate(prompts) for place, token in enumerate(prompt)]
        outputs = [[token] for token in self._forward(fed, sampler)]
        bursts = [(monotonic() - begin, 1)]
        while len(bursts) < asked.output_tokens:
            fed = [(output[-1], len(prompts[row]) + len(output) - 1, row, True) for row, output in enumerate(outputs)]
            for output, token in zip(outputs, self._forward(fed, sampler), strict=True):
                output.append(token)
            bursts.append((monotonic() - begin, 1))
        return Decoded(tokens=tuple(map(tuple, outputs)), bursts=tuple(bursts))

    def _forward(self, fed: Sequence[Fed], sampler: cpp.LlamaSampler) -> Iterator[int]:
        """Feed tokens (id, position, sequence, whether one is to follow) and yield, in their order, the tokens that follow."""
        for first in range(0, len(fed), BATCH):
            part = fed[first : first + BATCH]
            batch = cpp.LlamaBatch(n_tokens=len(part), embd=0, n_seq_max=self.rows)
            for token, position, row, last in part:
                batch.add(token, position, [row], last)
            self.context.decode(batch)
            yield from (int(sampler.sample(self.context, place)) for place, (_, _, _, last) in enumerate(part) if last)


def _sampler(asked: Decode) -> cpp.LlamaSampler:
    sampler = cpp.LlamaSampler(cpp.LlamaSamplerChainParams())
    if asked.temperature:
        sampler.add_temp(asked.temperature)
        sampler.add_dist(asked.seed)
    else:
        sampler.add_greedy()
    return sampler
