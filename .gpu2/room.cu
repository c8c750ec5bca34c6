#include <cstdio>
#include <cstdlib>
#include <chrono>
#include <thread>
#include <cuda_runtime.h>
#define C(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { printf("%s: %s\n", #x, cudaGetErrorString(e_)); exit(1);} } while (0)
// spins with some 64 registers
template <int T> __global__ void __launch_bounds__(T, 512/T*2) spin(volatile int *stop, int *count, float *out) {
  float r[40];
  for (int i = 0; i < 40; i++) r[i] = threadIdx.x + i;
  if (threadIdx.x == 0) atomicAdd(count, 1);
  while (!*stop) { 
#pragma unroll
    for (int i = 0; i < 40; i++) r[i] = r[i] * 1.0001f + r[(i + 7) % 40]; }
  float s = 0; for (int i = 0; i < 40; i++) s += r[i];
  if (s == 12345.678f) *out = s;
}
__global__ void plain(volatile int *done) { *done = 1; }
__global__ void small8(volatile int *done) { __shared__ unsigned long long any; if (threadIdx.x == 0) any = 1; __syncthreads(); *done = (int)any; }
__global__ void large(volatile int *done) { extern __shared__ int x[]; x[threadIdx.x] = 1; __syncthreads(); *done = x[0]; }
int main() {
  C(cudaSetDeviceFlags(cudaDeviceMapHost));
  int *h, *hd; C(cudaHostAlloc(&h, 4096, cudaHostAllocMapped)); C(cudaHostGetDevicePointer(&hd, h, 0));
  int *count; float *out; C(cudaMalloc(&count, 4)); C(cudaMalloc(&out, 4));
  cudaStream_t s[3]; for (auto &x : s) C(cudaStreamCreateWithFlags(&x, cudaStreamNonBlocking));
  C(cudaFuncSetAttribute(large, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10));
  plain<<<1, 32>>>(hd + 1); small8<<<1, 32>>>(hd + 1); large<<<1, 128, 200 << 10>>>(hd + 1); C(cudaDeviceSynchronize());
  cudaFuncAttributes a; C(cudaFuncGetAttributes(&a, spin<256>)); printf("spin<256> regs %d\n", a.numRegs); C(cudaFuncGetAttributes(&a, spin<512>)); printf("spin<512> regs %d\n", a.numRegs);
  struct { int threads, blocks, plans, carve; } shapes[] = {{256,256,2,-1},{256,256,1,-1},{512,128,2,-1},{512,128,1,-1},{256,248,2,-1},{256,240,2,-1},{256,256,2,100},{256,256,1,100},{512,128,2,100}};
  for (auto &p : shapes) for (int what = 0; what < 5; what++) {
    C(cudaFuncSetAttribute(spin<256>, cudaFuncAttributePreferredSharedMemoryCarveout, p.carve));
    C(cudaFuncSetAttribute(spin<512>, cudaFuncAttributePreferredSharedMemoryCarveout, p.carve));
    h[0] = 0; h[1] = 0; C(cudaMemset(count, 0, 4)); C(cudaDeviceSynchronize());
    for (int i = 0; i < p.plans; i++) {
      if (p.threads == 256) spin<256><<<p.blocks, 256, 0, s[i]>>>(hd, count, out); else spin<512><<<p.blocks, 512, 0, s[i]>>>(hd, count, out);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    auto t0 = std::chrono::steady_clock::now();
    const char *name[] = {"plain", "8 bytes shared", "48 KB shared", "100 KB shared", "200 KB shared"};
    if (what == 0) plain<<<1, 32, 0, s[2]>>>(hd + 1); else if (what == 1) small8<<<1, 32, 0, s[2]>>>(hd + 1);
    else large<<<1, 128, (what == 2 ? 48 : what == 3 ? 100 : 200) << 10, s[2]>>>(hd + 1);
    auto t1 = std::chrono::steady_clock::now();
    bool ran = false;
    for (int i = 0; i < 60 && !ran; i++) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); ran = ((volatile int *)h)[1] != 0; }
    ((volatile int *)h)[0] = 1; C(cudaDeviceSynchronize());
    printf("%d plans of %d x %d carveout %d, then %-15s: %s (enqueue %.0f us)\n", p.plans, p.blocks, p.threads, p.carve, name[what], ran ? "runs" : "WAITS", std::chrono::duration<double, std::micro>(t1 - t0).count());
  }
}
