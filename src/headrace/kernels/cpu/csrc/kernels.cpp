// The kernel table of one instruction set; HEADRACE_ISA names it, the compiler's flags give it.
#include "attention.h"
#include "decode_attention.h"
#include "elementwise.h"
#include "linear.h"
#include "quantize.h"
#include "tile_attention.h"
#include "tile_linear.h"

#if defined(__AMX_BF16__)
#define HEADRACE_TILE_ATTENTION tile_attention_part
#define HEADRACE_TILES tile_linear, to_tiles
#else
#define HEADRACE_TILE_ATTENTION nullptr
#define HEADRACE_TILES nullptr, nullptr
#endif

#define HEADRACE_TEXT_(a) #a
#define HEADRACE_TEXT(a) HEADRACE_TEXT_(a)

extern "C" __attribute__((visibility("default"))) const headrace::KernelTable* headrace_kernels() {
  static const headrace::KernelTable table = {HEADRACE_TEXT(HEADRACE_ISA),
                                              quantize,
                                              quantize_tile,
                                              kFewestTileRows,
                                              arrange,
                                              kFloatColumns,
                                              linear,
                                              HEADRACE_TILES,
                                              unpack_row,
                                              attention_part,
                                              decode_attention_part,
                                              HEADRACE_TILE_ATTENTION,
                                              attention_fold,
                                              attention_finish,
                                              rms_norm,
                                              silu_mul,
                                              rotate,
                                              to_float,
                                              from_float};
  return &table;
}
