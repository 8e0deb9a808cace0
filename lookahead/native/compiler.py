"""How numba compiles our kernels. In: functions over numbers and arrays. Out: what `numba.njit` takes as `pipeline_class`.

numba optimises each function and turns it into machine code on its own, before it does so again within each caller. What a
`PartCompiler` compiles is only linked into its callers.

To find the type of an operation, numba tries all its definitions in turn, at each of its occurrences and in each round of type
inference: a third of the time in which drafting was compiled. Here a signature is looked up once for an operation and the types
of its arguments (`_faster`).

numba has no options for either, so classes of its compiler are derived from, and one of its methods is replaced while a kernel
is compiled, which holds numba's lock (tried with numba 0.60 and 0.68).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import NativeLowering
from numba.core.types.functions import BaseFunction

_resolved: dict[Any, Any] = {}  # function type, types of arguments -> signature


@contextlib.contextmanager
def _faster() -> Iterator[None]:
    """While open, numba looks up a signature once for each function and types of arguments, and Python's garbage collector does
    not look through the compiler's objects again and again. Not for several threads.
    """
    numba_types: Any = BaseFunction
    collecting = gc.isenabled()
    gc.disable()
    find = numba_types.get_call_type

    def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
        key = self, context, tuple(args), tuple(kws.items())
        found = _resolved.get(key)
        if found is None:
            found = _resolved[key] = find(self, context, args, kws)
        return found

    numba_types.get_call_type = get_call_type
    try:
        yield
    finally:
        numba_types.get_call_type = find
        if collecting:
            gc.enable()


class KernelCompiler(Compiler):
    """Compiles a kernel."""

    def compile_extra(self, func: Any) -> Any:
        with _faster():
            return super().compile_extra(func)


class _PartLibrary(JITCodeLibrary):
    """Code that is only linked into the code that calls it: neither optimised nor turned into machine code on its own.

    There it stays a function, unless it is to be inlined wherever it is called: LLVM would inline so much that it takes
    twice as long.
    """

    def add_ir_module(self, ir_module: Any) -> None:
        for function in ir_module.functions:
            if not function.is_declaration and "alwaysinline" not in function.attributes:
                function.attributes.add("noinline")
        super().add_ir_module(ir_module)

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            if hasattr(self, "_reload_init"):  # numba 0.60 has none
                self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):
    _name = "lookahead_part_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = state.flags.no_compile = True
        super().run_pass(state)
        state.cr = state.cr._replace(cfunc=object().__reduce__)  # numba wants a builtin function of its own
        state.targetctx.insert_user_function(state.cr.cfunc, state.cr.fndesc, [state.library])
        if hasattr(state.library, "_reload_init"):
            state.reload_init.extend(state.library._reload_init)
        return True


class PartCompiler(KernelCompiler):
    """Compiles a function that kernels call."""

    def define_pipelines(self) -> list[PassManager]:
        passes, builder = PassManager("lookahead part"), DefaultPassBuilder
        for stage in (
            builder.define_untyped_pipeline,
            builder.define_typed_pipeline,
            builder.define_nopython_lowering_pipeline,
        ):
            passes.passes.extend(stage(self.state).passes)
        passes.passes = [(_PartLowering if each is NativeLowering else each, text) for each, text in passes.passes]
        passes.finalize()
        return [passes]
