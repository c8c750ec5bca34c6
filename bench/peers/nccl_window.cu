// Times what NCCL alone takes to make a symmetric window: one process a GPU, 64 MiB of ncclMemAlloc, a blocking communicator, all
// ranks at once, the slowest rank.
//
//   nvcc -std=c++17 -o nccl_window nccl_window.cu -lnccl && ./nccl_window RANKS
#include <cuda_runtime.h>
#include <nccl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

constexpr int kMostRanks = 16, kWindows = 8;
constexpr size_t kBytes = 64 << 20;

// Shared is what the processes have in common.
struct Shared {
  pthread_barrier_t barrier;
  ncclUniqueId id;
  double allocated[kMostRanks][kWindows], registered[kMostRanks][kWindows]; // ms
};

static double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void must(ncclResult_t result, const char *what) {
  if (result == ncclSuccess) return;
  fprintf(stderr, "%s: %s\n", what, ncclGetErrorString(result));
  kill(0, SIGTERM); // the others would wait for this rank
}

static void measure(Shared *s, int ranks, int rank) {
  cudaSetDevice(rank);
  cudaFree(nullptr);
  if (rank == 0) must(ncclGetUniqueId(&s->id), "ncclGetUniqueId");
  pthread_barrier_wait(&s->barrier);
  ncclComm_t comm;
  must(ncclCommInitRank(&comm, ranks, s->id, rank), "ncclCommInitRank");
  for (int i = 0; i < kWindows; i++) {
    void *p;
    ncclWindow_t window;
    pthread_barrier_wait(&s->barrier);
    double began = now();
    must(ncclMemAlloc(&p, kBytes), "ncclMemAlloc");
    s->allocated[rank][i] = now() - began;
    pthread_barrier_wait(&s->barrier);
    began = now();
    must(ncclCommWindowRegister(comm, p, kBytes, &window, NCCL_WIN_COLL_SYMMETRIC), "ncclCommWindowRegister");
    s->registered[rank][i] = now() - began;
  }
  pthread_barrier_wait(&s->barrier);
}

int main(int argc, char **argv) {
  const int ranks = argc == 2 ? atoi(argv[1]) : 0;
  if (ranks < 1 || ranks > kMostRanks) {
    fprintf(stderr, "usage: %s RANKS, 1 to %d\n", argv[0], kMostRanks);
    return 2;
  }
  auto *s = (Shared *)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pthread_barrierattr_t shared;
  pthread_barrierattr_init(&shared);
  pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&s->barrier, &shared, ranks);
  for (int rank = 0; rank < ranks; rank++)
    if (fork() == 0) {
      measure(s, ranks, rank);
      _exit(0);
    }
  while (wait(nullptr) > 0) {
  }
  for (int i = 0; i < kWindows; i++) {
    double allocated = 0, registered = 0;
    for (int rank = 0; rank < ranks; rank++) {
      allocated = std::max(allocated, s->allocated[rank][i]);
      registered = std::max(registered, s->registered[rank][i]);
    }
    printf("%d ranks, window %d: ncclMemAlloc %.2f ms, ncclCommWindowRegister %.2f ms\n", ranks, i, allocated, registered);
  }
}
