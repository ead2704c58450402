// CUDA C++ for g++, as far as the sources of CuPy's kernels use it. Threads run one after another.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __constant__ static
// Blocks run one after another.
#define __shared__ static
#define __launch_bounds__(...)

struct mpidist_dim { unsigned x, y, z; };
static mpidist_dim threadIdx, blockIdx, blockDim, gridDim;

static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline float __int_as_float(int v) { float r; memcpy(&r, &v, 4); return r; }
static inline int __float_as_int(float v) { int r; memcpy(&r, &v, 4); return r; }
static inline double __longlong_as_double(long long v) { double r; memcpy(&r, &v, 8); return r; }
static inline long long __double_as_longlong(double v) { long long r; memcpy(&r, &v, 8); return r; }
// Loops that wait for a time end soon.
static inline long long clock64() { static long long now; return now += 10000000; }
static inline float rsqrtf(float v) { return 1 / sqrtf(v); }
static inline double rsqrt(double v) { return 1 / sqrt(v); }
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
inline std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
inline std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
template <class T> inline T mpidist_swap(T* at, T value) { T old = *at; *at = value; return old; }
#define MPIDIST_ATOMIC(T) \
  inline T atomicAdd(T* at, T value) { return mpidist_swap(at, T(*at + value)); } \
  inline T atomicMax(T* at, T value) { return mpidist_swap(at, *at < value ? value : *at); } \
  inline T atomicMin(T* at, T value) { return mpidist_swap(at, value < *at ? value : *at); } \
  inline T atomicExch(T* at, T value) { return mpidist_swap(at, value); } \
  inline T atomicCAS(T* at, T old, T value) { return mpidist_swap(at, *at == old ? value : *at); }
MPIDIST_ATOMIC(int)
MPIDIST_ATOMIC(unsigned)
typedef unsigned long long mpidist_ull;
MPIDIST_ATOMIC(mpidist_ull)
inline float atomicAdd(float* at, float value) { return mpidist_swap(at, *at + value); }
inline double atomicAdd(double* at, double value) { return mpidist_swap(at, *at + value); }

// Halves: bits to the nearest, ties to even.
static inline float __half2float(unsigned short h) {
  const unsigned sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 31) return __int_as_float(sign | 0x7f800000u | fraction << 13);
  const float size = exponent ? ldexpf(1024 + fraction, int(exponent) - 25) : ldexpf(fraction, -24);
  return sign ? -size : size;
}
static inline unsigned short __float2half_rn(float f) {
  const unsigned bits = __float_as_int(f), sign = (bits >> 16) & 0x8000u;
  const float size = fabsf(f);
  if (f != f) return sign | 0x7e00u;
  if (size >= 65520.0f) return sign | 0x7c00u;
  int exponent;
  frexpf(size, &exponent);
  if (size == 0 || exponent < -13) exponent = -13;
  // A half has 11 bits; nearbyint rounds ties to even.
  const unsigned units = unsigned(nearbyintf(ldexpf(size, 11 - exponent)));
  return sign | (units + (unsigned(exponent + 13) << 10));
}
struct half;
struct __half_raw;
static unsigned short __half_as_ushort(const half&);
static half __ushort_as_half(unsigned short);

#include <cupy/complex.cuh>
#include <cupy/carray.cuh>
#include <cupy/atomics.cuh>
#include <cupy/float16.cuh>
#include <cupy/math_constants.h>

static inline unsigned short __half_as_ushort(const half& h) { return __half_raw(h).x; }
static inline half __ushort_as_half(unsigned short v) { __half_raw raw = {v}; return half(raw); }

// Fibers: a thread that comes to a barrier waits there until all threads of its block, or of its warp, have come.
// They begin by `setcontext`, and change by jumps, which take no call of the system.
struct mpidist_place { jmp_buf jump; };
enum mpidist_state : char { RUNS, AT_BLOCK, AT_WARP, ENDED };
static jmp_buf mpidist_scheduler;
static std::vector<mpidist_place>* mpidist_places;
static std::vector<char>* mpidist_states;
static size_t mpidist_current;
static void (*mpidist_body)(void**);
static void** mpidist_arguments;
static void mpidist_wait(char state) {
  const mpidist_dim mine = threadIdx;
  (*mpidist_states)[mpidist_current] = state;
  if (!_setjmp((*mpidist_places)[mpidist_current].jump)) _longjmp(mpidist_scheduler, 1);
  threadIdx = mine;
}
inline void __syncthreads() { mpidist_wait(AT_BLOCK); }
inline void __syncwarp(unsigned = 0xffffffffu) { mpidist_wait(AT_WARP); }
// A value of another thread of the warp.
static char mpidist_shown[1024][16];
template <class T> inline T mpidist_shuffle(T value, unsigned lane, unsigned width) {
  const size_t mine = mpidist_current, first = mine - mine % width;
  memcpy(mpidist_shown[mine], &value, sizeof(T));
  __syncwarp();
  T other = value;
  if (lane < width) memcpy(&other, mpidist_shown[first + lane], sizeof(T));
  __syncwarp();
  return other;
}
template <class T> inline T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  return mpidist_shuffle(value, lane % width, width);
}
template <class T> inline T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  return mpidist_shuffle(value, unsigned(mpidist_current % width ^ mask), width);
}
template <class T> inline T __shfl_up_sync(unsigned, T value, unsigned by, int width = 32) {
  return mpidist_shuffle(value, unsigned(mpidist_current % width - by), width);
}
template <class T> inline T __shfl_down_sync(unsigned, T value, unsigned by, int width = 32) {
  return mpidist_shuffle(value, unsigned(mpidist_current % width + by), width);
}
static void mpidist_fiber() {
  mpidist_body(mpidist_arguments);
  (*mpidist_states)[mpidist_current] = ENDED;
  _longjmp(mpidist_scheduler, 1);
}
static void mpidist_enter(ucontext_t* begin, mpidist_place* place) {
  if (_setjmp(mpidist_scheduler)) return;
  if (begin) setcontext(begin);
  _longjmp(place->jump, 1);
}
// Let the threads from `begin` go on if all of them that have not ended wait in this state.
static void mpidist_release(size_t begin, size_t end, char state) {
  std::vector<char>& states = *mpidist_states;
  for (size_t n = begin; n < end; n++) if (states[n] != state && states[n] != ENDED) return;
  for (size_t n = begin; n < end; n++) if (states[n] == state) states[n] = RUNS;
}

static void mpidist_run_block(void (*body)(void**), void** arguments, bool has_barrier) {
  const size_t count = size_t(blockDim.x) * blockDim.y * blockDim.z, stack = 1 << 16;
  const auto place = [](size_t n) {
    threadIdx = {unsigned(n % blockDim.x), unsigned(n / blockDim.x % blockDim.y), unsigned(n / blockDim.x / blockDim.y)};
  };
  if (!has_barrier) {
    for (size_t n = 0; n < count; n++) { place(n); body(arguments); }
    return;
  }
  std::vector<mpidist_place> places(count);
  std::vector<char> has_begun(count);
  std::vector<char> states(count, RUNS);
  std::unique_ptr<char[]> stacks(new char[count * stack]);
  mpidist_places = &places; mpidist_states = &states; mpidist_body = body; mpidist_arguments = arguments;
  ucontext_t begin;
  getcontext(&begin);
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (size_t n = 0; n < count; n++) {
      if (states[n] != RUNS) continue;
      goes_on = true;
      mpidist_current = n;
      place(n);
      ucontext_t* first = nullptr;
      if (!has_begun[n]) {
        has_begun[n] = 1;
        begin.uc_stack.ss_sp = &stacks[n * stack];
        begin.uc_stack.ss_size = stack;
        begin.uc_link = nullptr;
        makecontext(&begin, mpidist_fiber, 0);
        first = &begin;
      }
      mpidist_enter(first, &places[n]);
    }
    for (size_t n = 0; n < count; n += 32) mpidist_release(n, n + 32 < count ? n + 32 : count, AT_WARP);
    mpidist_release(0, count, AT_BLOCK);
  }
  for (size_t n = 0; n < count; n++) if (states[n] != ENDED) abort();  // Threads wait at different barriers.
}

template <class... A, size_t... I>
inline void mpidist_call(void (*kernel)(A...), void** p, std::index_sequence<I...>) {
  kernel(*reinterpret_cast<std::remove_cv_t<std::remove_reference_t<A>>*>(p[I])...);
}
template <class... A> inline void mpidist_apply(void (*kernel)(A...), void** p) {
  mpidist_call(kernel, p, std::index_sequence_for<A...>());
}
template <class... A> inline int mpidist_sizes(void (*)(A...), size_t* sizes) {
  size_t* next = sizes;
  ((*next++ = sizeof(A)), ...);
  return sizeof...(A);
}
#define MPIDIST_LAUNCHER(NAME, HAS_BARRIER) \
  extern "C" int mpidist_sizes_##NAME(size_t* sizes) { return mpidist_sizes(&NAME, sizes); } \
  static void mpidist_body_##NAME(void** p) { mpidist_apply(&NAME, p); } \
  extern "C" void mpidist_run_##NAME(const unsigned* d, void** p) { \
    gridDim = {d[0], d[1], d[2]}; blockDim = {d[3], d[4], d[5]}; \
    for (unsigned z = 0; z < d[2]; z++) for (unsigned y = 0; y < d[1]; y++) for (unsigned x = 0; x < d[0]; x++) { \
      blockIdx = {x, y, z}; \
      mpidist_run_block(mpidist_body_##NAME, p, HAS_BARRIER); \
    } \
  }
