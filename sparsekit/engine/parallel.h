// Checks of index arrays and the split of work over TensorFlow's own threads.

#ifndef SPARSEKIT_ENGINE_PARALLEL_H_
#define SPARSEKIT_ENGINE_PARALLEL_H_

#include <algorithm>
#include <cstdint>
#include <functional>

#include "tensorflow.h"
#include "tensorflow/core/platform/threadpool.h"

namespace sparsekit {

inline const float* Floats(const Tensor& tensor) { return static_cast<const float*>(tensor.data()); }
inline float* Floats(Tensor* tensor) { return static_cast<float*>(tensor->data()); }
inline const int32_t* Ints(const Tensor& tensor) { return static_cast<const int32_t*>(tensor.data()); }
inline int32_t* Ints(Tensor* tensor) { return static_cast<int32_t*>(tensor->data()); }

// Threads worth waking for that many cycles of work; waking one costs some thousand.
inline int64_t Workers(OpKernelContext* context, double cycles) {
  const int64_t threads = context->device()->tensorflow_cpu_worker_threads()->num_threads;
  const int64_t useful = 1 + static_cast<int64_t>(std::min(cycles / 20000.0, 1e6));
  return std::max<int64_t>(1, std::min(threads, useful));
}

// Calls work(0) ... work(tasks - 1), each once, on up to `tasks` threads; returns when all are done.
inline void Parallel(OpKernelContext* context, int64_t tasks, const std::function<void(int64_t)>& work) {
  if (tasks <= 1) {
    if (tasks == 1) work(0);
    return;
  }
  context->device()->tensorflow_cpu_worker_threads()->workers->ParallelFor(
      tasks, tensorflow::thread::ThreadPool::SchedulingParams::Fixed(1), [&work](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) work(task);
      });
}

// First segment of part `part` of `parts`, so that each part has about as many kept weights; a multiple of `unit`.
// A segment costs something even where it is empty: `overhead`, counted in kept weights.
inline int64_t Boundary(const int32_t* pointers, int64_t segments, int64_t part, int64_t parts, int64_t unit,
                        int64_t overhead) {
  if (part <= 0) return 0;
  if (part >= parts) return segments;
  const double goal = (static_cast<double>(pointers[segments]) + static_cast<double>(overhead) * segments) * part / parts;
  int64_t low = 0;
  int64_t high = segments;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (static_cast<double>(pointers[middle]) + static_cast<double>(overhead) * middle < goal) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return std::min(segments, (low + unit / 2) / unit * unit);
}

inline bool AllBelow(const int32_t* indices, int64_t count, int64_t bound) {
  uint32_t highest = 0;
  for (int64_t k = 0; k < count; ++k) highest = std::max(highest, static_cast<uint32_t>(indices[k]));
  return count == 0 || static_cast<int64_t>(highest) < bound;
}

// Pointers must rise from 0 to `kept`, or a kernel would read outside of the index arrays.
inline absl::Status CheckPointers(const char* name, const Tensor& pointers, int64_t kept) {
  if (pointers.dims() != 1 || pointers.NumElements() < 1) {
    return InvalidArgument(name, " must be a vector of at least one number, got shape ",
                                               pointers.shape().DebugString());
  }
  const int32_t* at = Ints(pointers);
  const int64_t last = pointers.NumElements() - 1;
  bool rising = at[0] == 0 && at[last] == kept;
  for (int64_t i = 0; i < last; ++i) rising &= at[i] <= at[i + 1];
  if (!rising) {
    return InvalidArgument(name, " must rise from 0 to the number of kept weights, ", kept);
  }
  return absl::OkStatus();
}

inline absl::Status CheckVector(const char* name, const Tensor& tensor, int64_t size) {
  if (tensor.dims() != 1 || tensor.NumElements() != size) {
    return InvalidArgument(name, " must be a vector of ", size, " numbers, got shape ",
                                               tensor.shape().DebugString());
  }
  return absl::OkStatus();
}

}  // namespace sparsekit

#endif  // SPARSEKIT_ENGINE_PARALLEL_H_
