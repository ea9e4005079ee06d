// The arithmetic of NCCL's reductions.
#pragma once
#include "communicator.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <vector>

namespace simulated {

template <class T>
T combine(T a, T b, ncclRedOp_t operation) {
  switch (operation) {
    case ncclProd: return a * b;
    case ncclMax: return a < b ? b : a;
    case ncclMin: return b < a ? b : a;
    default: return a + b;  // sum, average, and sum of products
  }
}

// What a rank gives, times its factor.
template <class T>
void multiply(std::vector<char>& given, const std::vector<char>& factor) {
  T* elements = reinterpret_cast<T*>(given.data());
  const T by = *reinterpret_cast<const T*>(factor.data());
  for (size_t i = 0; i < given.size() / sizeof(T); ++i) elements[i] = elements[i] * by;
}

// From what each rank gave, element by element, from the element `first` on.
template <class T>
void reduce_as(const std::vector<std::vector<char>>& all, size_t first, size_t count,
               ncclRedOp_t operation, void* to) {
  const auto of = [&](size_t rank, size_t i) {
    return reinterpret_cast<const T*>(all[rank].data())[first + i];
  };
  for (size_t i = 0; i < count; ++i) {
    T result = of(0, i);
    for (size_t rank = 1; rank < all.size(); ++rank)
      result = combine<T>(result, of(rank, i), operation);
    if (operation == ncclAvg) result = result / static_cast<T>(all.size());
    static_cast<T*>(to)[i] = result;
  }
}

// Calls `use` with a null pointer to the type; false for a type that is not here.
template <class Use>
bool with_type(ncclDataType_t type, const Use& use) {
  switch (type) {
    case ncclInt8: use(static_cast<int8_t*>(nullptr)); return true;
    case ncclUint8: use(static_cast<uint8_t*>(nullptr)); return true;
    case ncclInt32: use(static_cast<int32_t*>(nullptr)); return true;
    case ncclUint32: use(static_cast<uint32_t*>(nullptr)); return true;
    case ncclInt64: use(static_cast<int64_t*>(nullptr)); return true;
    case ncclUint64: use(static_cast<uint64_t*>(nullptr)); return true;
    case ncclFloat16: use(static_cast<c10::Half*>(nullptr)); return true;
    case ncclBfloat16: use(static_cast<c10::BFloat16*>(nullptr)); return true;
    case ncclFloat32: use(static_cast<float*>(nullptr)); return true;
    case ncclFloat64: use(static_cast<double*>(nullptr)); return true;
    default: return false;
  }
}

}  // namespace simulated
