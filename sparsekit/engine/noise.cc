// Random noise, mask and update in one pass over a weight.
//
// Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"). Key: the two seeds.
// Counter words 0 and 1: the number of the group of four words; word 2: the weight's index; word 3: the step. So an
// element's number depends on (seeds, step, weight, position) alone. The words are those of TensorFlow's stateless ops for
// the same key and counter. A uniform number takes half a word, 16 bits: the generator is most of the cost. They equal
// what TensorFlow's ops give bit for bit, normal numbers (a word each) to rounding.

#include <cmath>

#include "parallel.h"
#include "simd.h"
#include "tensorflow.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace sparsekit {
namespace {

using simd::Broadcast;
using simd::IntVector;
using simd::kBytes;
using simd::kWidth;
using simd::Vector;
using simd::WordVector;

typedef uint64_t LongVector __attribute__((vector_size(kBytes)));
constexpr int kGroups = kWidth / 2;       // Philox groups in one register
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kBatches = 4;               // registers that go through Philox together; 32 hold so many
#else
constexpr int kBatches = 2;
#endif
constexpr int64_t kBlock = 16384;         // elements of one piece of work

// Product of the lower halves of each 64-bit lane.
SPARSEKIT_INLINE LongVector MultiplyLow(LongVector a, LongVector b) {
#if defined(__AVX512F__)
  return reinterpret_cast<LongVector>(_mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<LongVector>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// The upper half of each 64-bit lane in its lower half; the upper half is noise. Shifts wait for the multiplier's port.
SPARSEKIT_INLINE LongVector Upper(LongVector a) {
#if defined(__AVX512F__)
  return reinterpret_cast<LongVector>(_mm512_shuffle_epi32(reinterpret_cast<__m512i>(a), _MM_PERM_DDBB));
#elif defined(__AVX2__)
  return reinterpret_cast<LongVector>(_mm256_shuffle_epi32(reinterpret_cast<__m256i>(a), 0xF5));
#else
  return a >> 32;
#endif
}

// Keeps the compiler from joining the product with a later sum: the result must not depend on whether the CPU can.
SPARSEKIT_INLINE Vector Rounded(Vector value) {
#if defined(__AVX512F__)
  asm("" : "+v"(value));
#elif defined(__x86_64__)
  asm("" : "+x"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#else
  asm("" : "+m"(value));
#endif
  return value;
}

SPARSEKIT_INLINE Vector Times(Vector a, Vector b) { return Rounded(a * b); }

SPARSEKIT_INLINE Vector SquareRoot(Vector value) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_sqrt_ps(reinterpret_cast<__m512>(value)));
#elif defined(__AVX__)
  return reinterpret_cast<Vector>(_mm256_sqrt_ps(reinterpret_cast<__m256>(value)));
#elif defined(__x86_64__)
  return reinterpret_cast<Vector>(_mm_sqrt_ps(reinterpret_cast<__m128>(value)));
#elif defined(__aarch64__)
  return reinterpret_cast<Vector>(vsqrtq_f32(reinterpret_cast<float32x4_t>(value)));
#else
  for (int i = 0; i < kWidth; ++i) value[i] = std::sqrt(value[i]);
  return value;
#endif
}

// Everything about a stream of numbers that does not change from group to group.
struct Stream {
  LongVector key0[10], key1[10];  // round keys
  LongVector index, step, lanes;

  Stream(int64_t first_seed, int64_t second_seed, uint32_t weight, uint32_t at) {
    uint32_t low = static_cast<uint32_t>(first_seed);
    uint32_t high = static_cast<uint32_t>(second_seed);
    for (int round = 0; round < 10; ++round) {
      key0[round] = LongVector{} + low;
      key1[round] = LongVector{} + high;
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
    index = LongVector{} + weight;
    step = LongVector{} + at;
    for (int lane = 0; lane < kGroups; ++lane) lanes[lane] = lane;
  }
};

// Words of kBatches * kGroups groups from `first` on, each in the lower half of a lane (the upper half is noise). A round
// waits for its products, so several batches go through the rounds side by side.
SPARSEKIT_INLINE void Philox(const Stream& stream, uint64_t first, LongVector words[kBatches][4]) {
  LongVector c[kBatches][4];
  for (int b = 0; b < kBatches; ++b) {
    c[b][0] = stream.lanes + (first + b * kGroups);
    c[b][1] = c[b][0] >> 32;
    c[b][2] = stream.index;
    c[b][3] = stream.step;
  }
  const LongVector multiplier0 = LongVector{} + 0xD2511F53u;
  const LongVector multiplier1 = LongVector{} + 0xCD9E8D57u;
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 4
    for (int b = 0; b < kBatches; ++b) {
      const LongVector product0 = MultiplyLow(c[b][0], multiplier0);
      const LongVector product1 = MultiplyLow(c[b][2], multiplier1);
      c[b][0] = Upper(product1) ^ c[b][1] ^ stream.key0[round];
      c[b][1] = product1;
      c[b][2] = Upper(product0) ^ c[b][3] ^ stream.key1[round];
      c[b][3] = product0;
    }
  }
  for (int b = 0; b < kBatches; ++b) {
    for (int word = 0; word < 4; ++word) words[b][word] = c[b][word];
  }
}

// Numbers in [1, 2).
SPARSEKIT_INLINE Vector OneToTwo(LongVector bits) {
  return reinterpret_cast<Vector>((bits & 0x007fffff007fffffu) | 0x3f8000003f800000u);
}
SPARSEKIT_INLINE LongVector Pair(LongVector even, LongVector odd) { return (even & 0xffffffffu) | (odd << 32); }

// Lanes of 64 bits: a0 b0 a1 b1 ... of the lower and of the upper halves.
SPARSEKIT_INLINE void ZipPairs(Vector a, Vector b, Vector* low, Vector* high) {
#if defined(__AVX512F__)
  *low = SPARSEKIT_SHUFFLE(a, b, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23);
  *high = SPARSEKIT_SHUFFLE(a, b, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31);
#elif defined(__AVX__)
  *low = SPARSEKIT_SHUFFLE(a, b, 0, 1, 8, 9, 2, 3, 10, 11);
  *high = SPARSEKIT_SHUFFLE(a, b, 4, 5, 12, 13, 6, 7, 14, 15);
#else
  *low = SPARSEKIT_SHUFFLE(a, b, 0, 1, 4, 5);
  *high = SPARSEKIT_SHUFFLE(a, b, 2, 3, 6, 7);
#endif
}

struct Uniform {
  static constexpr int kPerWord = 2;

  // (2 h + 1) / 65536 of each half h as a signed number, the lower half first: mean exactly zero, and nothing rounds.
  static SPARSEKIT_INLINE void Draw(const LongVector words[4], Vector out[4]) {
    Vector ordered[2];
    ZipPairs(reinterpret_cast<Vector>(Pair(words[0], words[1])), reinterpret_cast<Vector>(Pair(words[2], words[3])),
             &ordered[0], &ordered[1]);
    for (int i = 0; i < 2; ++i) {
      const WordVector bits = reinterpret_cast<WordVector>(ordered[i]);
      const Vector low = Scaled((bits << 16) | 0x8000u);
      const Vector high = Scaled((bits & 0xffff0000u) | 0x8000u);
      out[2 * i] = simd::ZipLow(low, high);
      out[2 * i + 1] = simd::ZipHigh(low, high);
    }
  }

  static SPARSEKIT_INLINE Vector Scaled(WordVector bits) {
    return __builtin_convertvector(reinterpret_cast<IntVector>(bits), Vector) * 0x1p-31f;
  }
};

struct Normal {
  static constexpr int kPerWord = 1;

  // Box-Muller: radius sqrt(-2 log u) of the pair's first number, angle 2 pi v of its second; sine, then cosine.
  static SPARSEKIT_INLINE void Draw(const LongVector words[4], Vector out[2]) {
    // Gather the first numbers of all pairs into one vector and the second numbers into another.
    const Vector u = OneToTwo(Pair(words[0], words[2])) - 1.0f;
    const Vector v = OneToTwo(Pair(words[1], words[3])) - 1.0f;
    const Vector radius = SquareRoot(Times(Logarithm(u), Broadcast(-2.0f)));
    Vector sine;
    Vector cosine;
    Turn(v, &sine, &cosine);
    // Lanes are (group 0 pair 0, group 0 pair 1, group 1 pair 0, ...): memory order is sine, cosine of each.
    const Vector first = Times(sine, radius);
    const Vector second = Times(cosine, radius);
    out[0] = simd::ZipLow(first, second);
    out[1] = simd::ZipHigh(first, second);
  }

  // log u for u in [0, 1), cut at 1e-7: u = 2^e m, log m = 2 artanh((m - 1) / (m + 1)) as a series.
  static SPARSEKIT_INLINE Vector Logarithm(Vector u) {
    const Vector least = Broadcast(1e-7f);
    u = simd::Select(u < least, least, u);
    const IntVector bits = reinterpret_cast<IntVector>(u);
    // m in [sqrt(1/2), sqrt(2)), so that the series is short.
    const IntVector exponent = (bits - 0x3f3504f3) >> 23;
    const Vector m = reinterpret_cast<Vector>(bits - (exponent << 23));
    const Vector s = (m - 1.0f) / (m + 1.0f);
    const Vector z = Times(s, s);
    Vector sum = Broadcast(1.0f / 9.0f);
    sum = Times(sum, z) + 1.0f / 7.0f;
    sum = Times(sum, z) + 1.0f / 5.0f;
    sum = Times(sum, z) + 1.0f / 3.0f;
    sum = Times(sum, z) + 1.0f;
    const Vector whole = __builtin_convertvector(exponent, Vector);
    return Times(whole, Broadcast(0.693147180559945f)) + Times(s + s, sum);
  }

  // Sine and cosine of 2 pi v: the quarter turn is exact, the rest is a Taylor polynomial on [-pi/4, pi/4].
  static SPARSEKIT_INLINE void Turn(Vector v, Vector* sine, Vector* cosine) {
    const Vector quarters = v * 4.0f;
    const IntVector quarter = __builtin_convertvector(quarters + 0.5f, IntVector);
    const Vector angle = Times(quarters - __builtin_convertvector(quarter, Vector), Broadcast(1.57079632679490f));
    const Vector z = Times(angle, angle);
    Vector s = Broadcast(1.0f / 362880.0f);
    s = Times(s, z) - 1.0f / 5040.0f;
    s = Times(s, z) + 1.0f / 120.0f;
    s = Times(s, z) - 1.0f / 6.0f;
    s = Times(Times(s, z), angle) + angle;
    Vector c = Broadcast(1.0f / 40320.0f);
    c = Times(c, z) - 1.0f / 720.0f;
    c = Times(c, z) + 1.0f / 24.0f;
    c = Times(c, z) - 0.5f;
    c = Times(c, z) + 1.0f;
    const IntVector odd = -(quarter & 1);
    const Vector sine_part = simd::Select(odd, c, s);
    const Vector cosine_part = simd::Select(odd, s, c);
    // The sine turns negative in quarters 2 and 3, the cosine in 1 and 2.
    *sine = Negated(sine_part, (quarter & 2) << 30);
    *cosine = Negated(cosine_part, ((quarter + 1) & 2) << 30);
  }

  static SPARSEKIT_INLINE Vector Negated(Vector value, IntVector sign) {
    return reinterpret_cast<Vector>(reinterpret_cast<IntVector>(value) ^ sign);
  }
};

SPARSEKIT_INLINE Vector KeepOnly(const uint8_t* keep, Vector value) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keep));
  const __mmask16 kept = _mm_test_epi8_mask(bytes, bytes);
  return reinterpret_cast<Vector>(_mm512_maskz_mov_ps(kept, reinterpret_cast<__m512>(value)));
#elif defined(__AVX2__)
  const __m256i lanes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(keep)));
  return simd::Select(reinterpret_cast<IntVector>(lanes) != 0, value, Vector{});
#else
  IntVector lanes;
  for (int i = 0; i < kWidth; ++i) lanes[i] = keep[i];
  return simd::Select(lanes != 0, value, Vector{});
#endif
}

// to = from + amplitude * noise where kept, +0 elsewhere, for the elements [begin, end); begin is a multiple of kBlock.
template <typename Distribution>
void AddNoise(const Stream& stream, float amplitude, const uint8_t* keep, const float* from, float* to, int64_t begin,
              int64_t end) {
  constexpr int kVectors = 2 * Distribution::kPerWord;  // of one batch
  constexpr int kElements = kBatches * kVectors * kWidth;
  static_assert(kBlock % kElements == 0, "a worker begins with a whole group of words");
  const Vector scale = Broadcast(amplitude);
  for (int64_t at = begin; at < end; at += kElements) {
    LongVector words[kBatches][4];
    Philox(stream, static_cast<uint64_t>(at / (4 * Distribution::kPerWord)), words);
    Vector noise[kBatches * kVectors];
    for (int b = 0; b < kBatches; ++b) Distribution::Draw(words[b], noise + kVectors * b);
    if (at + kElements <= end) {
      for (int j = 0; j < kBatches * kVectors; ++j) {
        Vector moved = simd::Load(from + at + j * kWidth) + Times(scale, noise[j]);
        if (keep != nullptr) moved = KeepOnly(keep + at + j * kWidth, moved);
        simd::Store(to + at + j * kWidth, moved);
      }
    } else {
      alignas(kBytes) float rest[kElements];
      for (int j = 0; j < kBatches * kVectors; ++j) simd::StoreAligned(rest + j * kWidth, Times(scale, noise[j]));
      for (int64_t i = at; i < end; ++i) to[i] = keep == nullptr || keep[i] ? from[i] + rest[i - at] : 0.0f;
    }
  }
}

class NoiseOp : public OpKernel {
 public:
  explicit NoiseOp(OpKernelConstruction* context) : OpKernel(context) {
    int64_t index = 0;
    OP_REQUIRES_OK(context, context->GetAttr("index", &index));
    OP_REQUIRES_OK(context, context->GetAttr("normal", &normal_));
    index_ = static_cast<uint32_t>(index);
  }

 protected:
  // Inputs after the weight: seed (2), step, amplitude, keep (none or one).
  absl::Status Check(OpKernelContext* context, const TensorShape& shape) const {
    if (context->input(1).NumElements() != 2 || context->input(2).NumElements() != 1 ||
        context->input(3).NumElements() != 1) {
      return InvalidArgument("seed must hold two numbers, step and amplitude one each");
    }
    if (context->num_inputs() > 4 && context->input(4).shape() != shape) {
      return InvalidArgument("keep has shape ", context->input(4).shape().DebugString(), ", the weight ",
                             shape.DebugString());
    }
    return absl::OkStatus();
  }

  void Run(OpKernelContext* context, const float* from, float* to, int64_t size) const {
    const int64_t* seed = static_cast<const int64_t*>(context->input(1).data());
    const int64_t step = *static_cast<const int64_t*>(context->input(2).data());
    const float amplitude = *Floats(context->input(3));
    const uint8_t* keep =
        context->num_inputs() > 4 ? static_cast<const uint8_t*>(context->input(4).data()) : nullptr;
    const Stream stream(seed[0], seed[1], index_, static_cast<uint32_t>(step));
    const int64_t blocks = (size + kBlock - 1) / kBlock;
    const int64_t workers = std::min(blocks, Workers(context, size * (normal_ ? 4.0 : 1.5)));
    Parallel(context, workers, [&](int64_t worker) {
      const int64_t begin = blocks * worker / workers * kBlock;
      const int64_t end = std::min(size, blocks * (worker + 1) / workers * kBlock);
      if (normal_) {
        AddNoise<Normal>(stream, amplitude, keep, from, to, begin, end);
      } else {
        AddNoise<Uniform>(stream, amplitude, keep, from, to, begin, end);
      }
    });
  }

 private:
  uint32_t index_;
  bool normal_;
};

// A tensor plus noise.
class NoisedOp : public NoiseOp {
 public:
  using NoiseOp::NoiseOp;

  void Compute(OpKernelContext* context) override {
    const Tensor weight = context->input(0);
    OP_REQUIRES_OK(context, Check(context, weight.shape()));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, weight.shape(), &out));
    Run(context, Floats(weight), Floats(out), weight.NumElements());
  }
};

// A resource variable, in its own memory unless somebody still holds a value that was read from it.
class NoiseUpdateOp : public NoiseOp {
 public:
  using NoiseOp::NoiseOp;

  void Compute(OpKernelContext* context) override {
    Locked variable;
    OP_REQUIRES_OK(context, variable.Lock(context, 1));
    Tensor* weight = variable[0];
    OP_REQUIRES(context, weight->dtype() == DT_FLOAT, InvalidArgument("the variable must be of dtype float32"));
    OP_REQUIRES_OK(context, Check(context, weight->shape()));
    if (weight->RefCountIsOne()) {
      Run(context, Floats(*weight), Floats(weight), weight->NumElements());
      return;
    }
    Tensor moved;
    OP_REQUIRES_OK(context, context->allocate_temp(DT_FLOAT, weight->shape(), &moved));
    Run(context, Floats(*weight), Floats(&moved), weight->NumElements());
    *weight = moved;
  }
};

REGISTER_OP("SparsekitNoised")
    .Input("weight: float")
    .Input("seed: int64")
    .Input("step: int64")
    .Input("amplitude: float")
    .Input("keep: masks * bool")
    .Attr("masks: int >= 0")
    .Attr("index: int")
    .Attr("normal: bool")
    .Output("moved: float")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SparsekitNoised").Device(DEVICE_CPU), NoisedOp);

REGISTER_OP("SparsekitNoiseUpdate")
    .Input("weight: resource")
    .Input("seed: int64")
    .Input("step: int64")
    .Input("amplitude: float")
    .Input("keep: masks * bool")
    .Attr("masks: int >= 0")
    .Attr("index: int")
    .Attr("normal: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return absl::OkStatus(); });
REGISTER_KERNEL_BUILDER(Name("SparsekitNoiseUpdate").Device(DEVICE_CPU), NoiseUpdateOp);

}  // namespace
}  // namespace sparsekit
