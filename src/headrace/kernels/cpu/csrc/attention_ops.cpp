// Paged attention, rotation and KV write.
#include <algorithm>
#include <vector>

#include "ops.h"

namespace headrace {
namespace {

constexpr int64_t kQueryTile = 32;                     // tokens of a row that share the walk over its context
constexpr int64_t kTiledLeast = 32, kTiledMost = 256;  // by tiles: more tokens share what it takes to convert keys and values
constexpr int64_t kStateRoom = 16;                     // floats behind the sums of a state: sums of the next one begin at a cache line again
constexpr int64_t kNoSlot = -1;                        // of a token that is padding: its keys and values are stored nowhere

struct Item {  // tokens [first, last) of one row, whose positions start at `position`
  int64_t row, first, last, position, first_part, parts;
  bool tiled;  // by tiles
};

const int32_t* int32_data(const Tensor& t, int64_t size, const char* name) {
  check_dense(t, name);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.numel() >= size, "headrace_cpu: ", name, " must be int32 with at least ", size, " values");
  return static_cast<const int32_t*>(t.const_data_ptr());
}

void check_caches(const Tensor& k_cache, const Tensor& v_cache) {
  check_dense(k_cache, "k_cache");
  check_dense(v_cache, "v_cache");
  STD_TORCH_CHECK(k_cache.dim() == 4 && v_cache.dim() == 4 && k_cache.scalar_type() == v_cache.scalar_type(),
                  "headrace_cpu: caches must be [blocks, block_size, kv_heads, head_dim] of one dtype");
  for (int64_t i = 0; i < 4; ++i) STD_TORCH_CHECK(k_cache.size(i) == v_cache.size(i), "headrace_cpu: k_cache and v_cache differ in shape");
}

struct Rows {  // of a step
  const int32_t *query_start, *context_len;
  const int32_t* tiled;  // of each row's tokens the first so many go by tiles; null: none
  bool others_alone;     // all others attend each by itself: none is a prompt's
  int64_t count;
};

// Cuts the rows into items of few tokens, long contexts first: who starts last then has little to do.
std::vector<Item> items_of(const Rows& rows, int64_t window, int64_t threads) {
  std::vector<Item> items;
  items.reserve(static_cast<size_t>(rows.count));
  const auto cut = [&](int64_t row, int64_t begin, int64_t end, int64_t most, bool tiled) {
    for (int64_t first = begin; first < end; first += most) {
      const int64_t last = std::min(first + most, end), position = rows.context_len[row] - rows.query_start[row + 1] + first;
      const int64_t lowest = window > 0 && position >= window ? position - window + 1 : 0;
      const int64_t first_part = lowest / kPart, last_part = (position + last - first - 1) / kPart;
      items.push_back({row, first, last, position, first_part, last_part - first_part + 1, tiled});
    }
  };
  const int64_t share = rows.query_start[rows.count] / (4 * threads) / kTiledLeast * kTiledLeast;
  const int64_t tiled_at_once = std::clamp(share, kTiledLeast, kTiledMost);
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t first = rows.query_start[row], others = first + (rows.tiled ? rows.tiled[row] : 0);
    cut(row, first, others, tiled_at_once, true);
    cut(row, others, rows.query_start[row + 1], kQueryTile, false);
  }
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    const int64_t work_a = (a.last - a.first) * (a.position + 1), work_b = (b.last - b.first) * (b.position + 1);
    return work_a != work_b ? work_a > work_b : a.first < b.first;
  });
  return items;
}

}  // namespace

// q and out: float32 [T, H, D]
void attend(const Attention& args, const Rows& rows, const int32_t* block_table, int64_t table_width, float* out) {
  const int64_t group = args.num_heads / args.num_kv_heads, stride = args.head_dim + kStateRoom, threads = torch::stable::get_num_threads();
  const std::vector<Item> items = items_of(rows, args.window, threads);
  const auto count = static_cast<int64_t>(items.size());
  const bool alone = rows.others_alone && args.cache_dtype != kFloat32;
  int64_t parts = 0;
  for (const Item& item : items) parts += item.parts;
  // one piece of work holds all heads where there are parts enough (their keys are neighbours in memory), else one
  const int64_t heads = parts >= 2 * threads ? args.num_kv_heads : 1, cuts = args.num_kv_heads / heads;
  const auto states_of = [&](const Item& item) { return heads * (item.last - item.first) * group; };
  const auto compute = [&](const Item& item, int64_t cut, int64_t part, float* state) {
    static thread_local Scratch scratch;
    const int64_t work = item.tiled ? tile_attention_scratch(args.head_dim) : (kScratchRows + states_of(item)) * args.head_dim;
    const auto& compute_part = item.tiled ? kernels().tile_attention_part : alone ? kernels().decode_attention_part : kernels().attention_part;
    compute_part(args, block_table + item.row * table_width, cut * heads, (cut + 1) * heads, item.first_part + part, item.first, item.last,
                 item.position, state, stride, scratch.get<float>(work));
  };
  const auto fold = [&](const Item& item, float* into, const float* next) {
    for (int64_t i = 0; i < states_of(item); ++i) kernels().attention_fold(into + i * stride, next + i * stride, args.head_dim);
  };
  const auto finish = [&](const Item& item, int64_t cut, const float* state) {
    const int64_t tokens = item.last - item.first;
    for (int64_t i = 0; i < states_of(item); ++i) {
      const int64_t head = cut * heads + i / (tokens * group), token = item.first + i / group % tokens;
      kernels().attention_finish(state + i * stride, args.head_dim, out + (token * args.num_heads + head * group + i % group) * args.head_dim);
    }
  };
  if (parts == count || count * cuts >= 4 * threads) {  // enough to do for all: one thread walks an item's whole context
    parallel_items(count * cuts, 1, [&](int64_t begin, int64_t end) {
      static thread_local Scratch states;
      for (int64_t piece = begin; piece < end; ++piece) {
        const Item& item = items[static_cast<size_t>(piece / cuts)];
        float *state = states.get<float>(2 * states_of(item) * stride), *next = state + states_of(item) * stride;
        compute(item, piece % cuts, 0, state);
        for (int64_t part = 1; part < item.parts; ++part) {
          compute(item, piece % cuts, part, next);
          fold(item, state, next);
        }
        finish(item, piece % cuts, state);
      }
    });
    return;
  }
  // Few items of long contexts: parts are computed apart, then folded in the same order.
  static thread_local Scratch all_states;
  std::vector<int64_t> offset{0}, first_piece{0};
  for (const Item& item : items) {
    offset.push_back(offset.back() + item.parts * cuts * states_of(item) * stride);
    first_piece.push_back(first_piece.back() + item.parts * cuts);
  }
  float* states = all_states.get<float>(offset.back());
  parallel_items(first_piece.back(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const auto i = static_cast<size_t>(std::upper_bound(first_piece.begin(), first_piece.end(), piece) - first_piece.begin() - 1);
      const int64_t local = piece - first_piece[i];
      compute(items[i], local / items[i].parts, local % items[i].parts, states + offset[i] + local * states_of(items[i]) * stride);
    }
  });
  parallel_items(count * cuts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const auto i = static_cast<size_t>(piece / cuts);
      float* state = states + offset[i] + piece % cuts * items[i].parts * states_of(items[i]) * stride;
      for (int64_t part = 1; part < items[i].parts; ++part) fold(items[i], state, state + part * states_of(items[i]) * stride);
      finish(items[i], piece % cuts, state);
    }
  });
}

Attention attention_args(const float* q, int64_t num_heads, const Tensor& k_cache, const Tensor& v_cache, double scale, int64_t window,
                         double softcap) {
  check_caches(k_cache, v_cache);
  const int64_t head_dim = k_cache.size(3), kv_heads = k_cache.size(2);
  STD_TORCH_CHECK(num_heads % kv_heads == 0, "headrace_cpu: ", num_heads, " query heads can't share ", kv_heads, " key/value heads");
  STD_TORCH_CHECK(head_dim % 16 == 0 && head_dim > 0, "headrace_cpu: the head size must be a multiple of 16, not ", head_dim);
  return {q,
          k_cache.const_data_ptr(),
          v_cache.const_data_ptr(),
          dtype_of(k_cache, "k_cache"),
          k_cache.size(1),
          num_heads,
          kv_heads,
          head_dim,
          static_cast<float>(scale),
          window,
          static_cast<float>(softcap)};
}

// Every position below a row's context length must be in the caches. window, softcap: 0 for none. Tokens past the last row are padding: zeros.
// prompt_tokens: of each row's tokens the first so many go by tiles where there are some.
Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& query_start, const Tensor& context_len,
                       const Tensor& block_table, const std::optional<Tensor>& prompt_tokens, double scale, int64_t window, double softcap) {
  static thread_local Scratch in, out;
  STD_TORCH_CHECK(q.dim() == 3, "headrace_cpu: q must be [T, H, D]");
  const Attention args = attention_args(as_floats(q, "q", in), q.size(1), k_cache, v_cache, scale, window, softcap);
  STD_TORCH_CHECK(q.size(2) == args.head_dim, "headrace_cpu: q and the caches differ in head size");
  const int64_t rows = context_len.numel();
  STD_TORCH_CHECK(block_table.dim() == 2 && block_table.size(0) >= rows, "headrace_cpu: block_table must be [R, B]");
  const int64_t sizes[3] = {q.size(0), q.size(1), q.size(2)};
  Tensor y = new_tensor(sizes, 3, q.scalar_type());
  const FloatOut to(y, "q", out);
  const int32_t *starts = int32_data(query_start, rows + 1, "query_start"), *lens = int32_data(context_len, rows, "context_len");
  check_rows(starts, lens, rows, q.size(0), block_table.size(1) * args.block_size);
  const bool by_tiles = tokens_of_step(query_start, prompt_tokens, q.size(0)).prompts.count > 0;
  const int32_t* tiled = by_tiles ? int32_data(*prompt_tokens, rows, "prompt_tokens") : nullptr;
  const bool by_kind = prompt_tokens && kernels().tile_attention_part;
  attend(args, {starts, lens, tiled, by_kind, rows}, int32_data(block_table, rows * block_table.size(1), "block_table"), block_table.size(1), to.data);
  std::fill(to.data + starts[rows] * q.size(1) * q.size(2), to.data + q.numel(), 0.0f);
  to.store();
  return y;
}

void check_rows(const int32_t* query_start, const int32_t* context_len, int64_t rows, int64_t tokens, int64_t most_context) {
  STD_TORCH_CHECK(query_start[0] == 0 && query_start[rows] <= tokens, "headrace_cpu: query_start must go from 0 to at most the number of tokens, ", tokens);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t n = query_start[row + 1] - query_start[row];
    STD_TORCH_CHECK(0 <= n && n <= context_len[row] && context_len[row] <= most_context, "headrace_cpu: row ", row, " has ", n,
                    " tokens and a context of ", context_len[row], ", and its block table holds ", most_context);
  }
}

// qkv: [T, (H + 2 KH) * D] -> turned queries, float32 [T, H, D]; turned keys, and values, go to the caches' slots (kNoSlot: nowhere).
void rotate_and_store(const float* qkv, int64_t tokens, int64_t num_heads, const float* cos, const float* sin, int64_t rotary, const Tensor& k_cache,
                      const Tensor& v_cache, const int64_t* slots, float* q) {
  const int64_t kv_heads = k_cache.size(2), d = k_cache.size(3), width = (num_heads + 2 * kv_heads) * d;
  const Dtype dtype = dtype_of(k_cache, "k_cache");
  const int64_t element = dtype == kFloat32 ? 4 : 2;
  char *keys = static_cast<char*>(k_cache.mutable_data_ptr()), *values = static_cast<char*>(v_cache.mutable_data_ptr());
  parallel_items(tokens, 16, [&](int64_t first, int64_t last) {
    static thread_local Scratch scratch;
    float* turned = scratch.get<float>(d);
    for (int64_t t = first; t < last; ++t) {
      const float *row = qkv + t * width, *c = cos + t * rotary, *s = sin + t * rotary;
      for (int64_t h = 0; h < num_heads; ++h) kernels().rotate(row + h * d, c, s, rotary, d, q + (t * num_heads + h) * d);
      for (int64_t h = 0; h < kv_heads && slots[t] != kNoSlot; ++h) {
        const int64_t place = (slots[t] * kv_heads + h) * d * element;
        kernels().rotate(row + (num_heads + h) * d, c, s, rotary, d, turned);
        kernels().from_float(turned, dtype, d, keys + place, /*saturate=*/true);
        kernels().from_float(row + (num_heads + kv_heads + h) * d, dtype, d, values + place, /*saturate=*/true);
      }
    }
  });
}

const int64_t* checked_slots(const Tensor& slots, int64_t tokens, int64_t places) {
  check_dense(slots, "slots");
  STD_TORCH_CHECK(slots.scalar_type() == ScalarType::Long && slots.numel() == tokens, "headrace_cpu: slots must be int64 [T]");
  const int64_t* data = static_cast<const int64_t*>(slots.const_data_ptr());
  for (int64_t i = 0; i < tokens; ++i) {
    STD_TORCH_CHECK((0 <= data[i] && data[i] < places) || data[i] == kNoSlot, "headrace_cpu: slot ", data[i], " is outside of the cache");
  }
  return data;
}

int64_t rotary_size(const Tensor& cos, const Tensor& sin, int64_t tokens, int64_t head_dim) {
  const int64_t rotary = tokens ? cos.numel() / tokens : 0;
  STD_TORCH_CHECK(cos.numel() == tokens * rotary && sin.numel() == cos.numel() && rotary % 2 == 0 && rotary <= head_dim,
                  "headrace_cpu: cos and sin must be [T, 1, R] with an even R of at most the head size");
  return rotary;
}

Tensor rope_write_kv(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots) {
  static thread_local Scratch in, cos_in, sin_in, out;
  check_caches(k_cache, v_cache);
  STD_TORCH_CHECK(qkv.dim() == 2, "headrace_cpu: qkv must be [T, (H + 2 KH) * D]");
  const int64_t tokens = qkv.size(0), d = k_cache.size(3), heads = qkv.size(1) / d - 2 * k_cache.size(2);
  STD_TORCH_CHECK(heads > 0 && qkv.size(1) == (heads + 2 * k_cache.size(2)) * d, "headrace_cpu: qkv does not fit the caches");
  const int64_t rotary = rotary_size(cos, sin, tokens, d), sizes[3] = {tokens, heads, d};
  const int64_t* places = checked_slots(slots, tokens, k_cache.size(0) * k_cache.size(1));
  Tensor q = new_tensor(sizes, 3, qkv.scalar_type());
  const FloatOut to(q, "qkv", out);
  rotate_and_store(as_floats(qkv, "qkv", in), tokens, heads, as_floats(cos, "cos", cos_in), as_floats(sin, "sin", sin_in), rotary, k_cache, v_cache,
                   places, to.data);
  to.store();
  return q;
}

// residual += output(attention(rms_norm(residual))): one call for the first half of a decoder layer. Tokens past the last row are padding: they stay
// as they are, and cost nothing.
void attention_add_(const Tensor& residual, const Tensor& norm_weight, double eps, const Tensor& qkv, int64_t qkv_format, const Tensor& output,
                    int64_t output_format, int64_t num_heads, const Tensor& cos, const Tensor& sin, const Tensor& k_cache, const Tensor& v_cache,
                    const Tensor& slots, const Tensor& query_start, const Tensor& context_len, const Tensor& block_table,
                    const std::optional<Tensor>& prompt_tokens, double scale, int64_t window, double softcap) {
  static thread_local Scratch wide, turned, cos_in, sin_in, attended;
  const int64_t k = last_size(residual), padded = residual.numel() / k, rows = context_len.numel();
  check_dense(residual, "residual");
  STD_TORCH_CHECK(residual.scalar_type() == ScalarType::Float, "headrace_cpu: residual must be float32");
  Attention args = attention_args(nullptr, num_heads, k_cache, v_cache, scale, window, softcap);
  const int64_t d = args.head_dim, width = (num_heads + 2 * args.num_kv_heads) * d;
  const Weight first = weight_of(qkv, qkv_format, width, k), second = weight_of(output, output_format, k, num_heads * d);
  const int64_t rotary = rotary_size(cos, sin, padded, d);
  const int64_t* places = checked_slots(slots, padded, k_cache.size(0) * k_cache.size(1));
  STD_TORCH_CHECK(block_table.dim() == 2 && block_table.size(0) >= rows, "headrace_cpu: block_table must be [R, B]");
  const int32_t *starts = int32_data(query_start, rows + 1, "query_start"), *lens = int32_data(context_len, rows, "context_len");
  check_rows(starts, lens, rows, padded, block_table.size(1) * args.block_size);
  const int64_t tokens = starts[rows];
  float *all = wide.get<float>(tokens * width), *q = turned.get<float>(tokens * num_heads * d), *out = attended.get<float>(tokens * num_heads * d);
  float* h = static_cast<float*>(residual.mutable_data_ptr());
  const float* norm = float_weight(norm_weight, k, "norm_weight");
  const StepTokens step = tokens_of_step(query_start, prompt_tokens, padded);
  for (const Tokens& each : {step.prompts, step.others}) multiply_normed(first, h, norm, static_cast<float>(eps), each, all);
  rotate_and_store(all, tokens, num_heads, as_floats(cos, "cos", cos_in), as_floats(sin, "sin", sin_in), rotary, k_cache, v_cache, places, q);
  args.q = q;
  const int32_t* tiled = second.tiled && step.prompts.count ? int32_data(*prompt_tokens, rows, "prompt_tokens") : nullptr;
  const bool by_kind = second.tiled && prompt_tokens;
  attend(args, {starts, lens, tiled, by_kind, rows}, int32_data(block_table, rows * block_table.size(1), "block_table"), block_table.size(1), out);
  for (const Tokens& each : {step.prompts, step.others}) multiply_tokens(second, out, each, nullptr, true, h);
}

}  // namespace headrace
