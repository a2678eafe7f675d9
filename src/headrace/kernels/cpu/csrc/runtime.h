// What the operators share: the kernel table in use, threads, work space, and tensors seen as float32 rows.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <memory>
#include <optional>

#include "kernels.h"
#include "thread_pool.h"

namespace headrace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const KernelTable* kernels_in_use = nullptr;

inline const KernelTable& kernels() {
  STD_TORCH_CHECK(kernels_in_use != nullptr, "headrace_cpu: no kernels are loaded; call headrace.kernels.cpu.load() first");
  return *kernels_in_use;
}

// f(first, last) for pieces of [0, n), on as many of our threads as torch would use; who is free takes the next `grain` items.
template <class Function>
void parallel_items(int64_t n, int64_t grain, const Function& f) {
  share_items(torch::stable::get_num_threads(), n, grain, f);
}

// Memory of a thread that grows and stays. One object per use; aligned to cache lines. From a huge page's size on in huge pages, where the system
// has them: a step goes over its work space in strides of a row, and each row would be another page.
class Scratch {
 public:
  template <class T>
  T* get(int64_t n) {
    const size_t wanted = static_cast<size_t>(n) * sizeof(T);
    if (wanted > size_) {
      const size_t bytes = (wanted + 63) / 64 * 64;
      data_.reset();  // first, so that old and new never count together
      void* memory = nullptr;
      const bool got = posix_memalign(&memory, bytes < kHugePage ? 64 : kHugePage, bytes) == 0;
      data_.reset(got ? static_cast<char*>(memory) : nullptr);
      size_ = got ? bytes : 0;
      STD_TORCH_CHECK(got, "headrace_cpu: no memory for ", bytes, " bytes of work space");
#if defined(__linux__)
      if (bytes >= kHugePage) madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // the rest would be a huge page of little use
#endif
    }
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  static constexpr size_t kHugePage = 1 << 21;
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0;
};

inline Dtype dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return kFloat32;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Half: return kFloat16;
    default: STD_TORCH_CHECK(false, "headrace_cpu: ", name, " must be float32, bfloat16 or float16");
  }
}

inline void check_dense(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && t.is_contiguous(), "headrace_cpu: ", name, " must be a contiguous CPU tensor");
}

inline const float* float_weight(const Tensor& t, int64_t size, const char* name) {
  check_dense(t, name);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.numel() == size, "headrace_cpu: ", name, " must be float32 with ", size, " values");
  return static_cast<const float*>(t.const_data_ptr());
}

// The tensor's values as float32: its own memory, or a converted copy in `scratch`.
inline const float* as_floats(const Tensor& t, const char* name, Scratch& scratch) {
  check_dense(t, name);
  const Dtype dtype = dtype_of(t, name);
  if (dtype == kFloat32) return static_cast<const float*>(t.const_data_ptr());
  float* out = scratch.get<float>(t.numel());
  kernels().to_float(t.const_data_ptr(), dtype, t.numel(), out);
  return out;
}

inline Tensor new_tensor(const int64_t* sizes, int64_t dims, ScalarType dtype) {
  int64_t strides[8], stride = 1;
  STD_TORCH_CHECK(dims <= 8, "headrace_cpu: tensors of more than 8 dimensions are not supported");
  for (int64_t i = dims - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i];
  }
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes, strides, torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// Where float32 results go: the tensor's own memory, or `scratch`, which store() converts.
class FloatOut {
 public:
  FloatOut(const Tensor& t, const char* name, Scratch& scratch) : tensor_(t), dtype_(dtype_of(t, name)) {
    data = dtype_ == kFloat32 ? static_cast<float*>(t.mutable_data_ptr()) : scratch.get<float>(t.numel());
  }
  void store() const {
    if (dtype_ != kFloat32) kernels().from_float(data, dtype_, tensor_.numel(), tensor_.mutable_data_ptr(), /*saturate=*/false);
  }
  float* data;

 private:
  const Tensor& tensor_;
  Dtype dtype_;
};

}  // namespace headrace
