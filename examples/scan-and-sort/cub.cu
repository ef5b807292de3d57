// Times CUB on request, for the comparison of this example:
//
//     nvcc -O3 -std=c++17 -arch=sm_90 -o cub cub.cu
//
// Each line of the input is `scan N RUNS` or `sort N RUNS`. The answer is a line with the seconds of a run: the mean of RUNS runs between two
// events, after one run that is not timed. The first line of the output is the version of CUB.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/version.cuh>

static void check(cudaError_t error) {
    if (error != cudaSuccess) {
        std::fprintf(stderr, "error: CUB: %s\n", cudaGetErrorString(error));
        std::exit(1);
    }
}

// The random keys of the example: SplitMix64.
__global__ void random_keys(uint32_t *keys, uint64_t n) {
    for (uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; i < n; i += uint64_t(gridDim.x) * blockDim.x) {
        uint64_t x = (i + 1) * 0x9e3779b97f4a7c15;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
        x = (x ^ x >> 27) * 0x94d049bb133111eb;
        keys[i] = uint32_t((x ^ x >> 31) >> 32);
    }
}

int main() {
    const int largest = 1 << 28;
    uint32_t *in, *out;
    check(cudaMalloc(&in, sizeof(uint32_t) * largest));
    check(cudaMalloc(&out, sizeof(uint32_t) * largest));
    random_keys<<<1024, 256>>>(in, largest);
    check(cudaDeviceSynchronize());

    cudaStream_t stream;
    cudaEvent_t start, end;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check(cudaEventCreate(&start));
    check(cudaEventCreate(&end));
    void *temporary = nullptr;
    size_t bytes = 0;
    auto scan = [&](int n, size_t &size) { return cub::DeviceScan::InclusiveSum(temporary, size, in, out, n, stream); };
    auto sort = [&](int n, size_t &size) {
        return cub::DeviceRadixSort::SortKeys(temporary, size, in, out, n, 0, 32, stream);
    };
    size_t for_scan = 0, for_sort = 0;
    check(scan(largest, for_scan));
    check(sort(largest, for_sort));
    bytes = for_scan > for_sort ? for_scan : for_sort;
    check(cudaMalloc(&temporary, bytes));

    std::printf("CUB %d.%d.%d\n", CUB_MAJOR_VERSION, CUB_MINOR_VERSION, CUB_SUBMINOR_VERSION);
    std::fflush(stdout);
    char operation[16];
    int n, runs;
    while (std::scanf("%15s %d %d", operation, &n, &runs) == 3) {
        if (n < 0 || n > largest || runs < 1) {
            std::fprintf(stderr, "error: CUB: expected at most %d elements and at least one run\n", largest);
            return 1;
        }
        const bool scans = operation[1] == 'c';
        auto run = [&] { check(scans ? scan(n, bytes) : sort(n, bytes)); };
        run();
        check(cudaEventRecord(start, stream));
        for (int i = 0; i < runs; i++) {
            run();
        }
        check(cudaEventRecord(end, stream));
        check(cudaEventSynchronize(end));
        float milliseconds;
        check(cudaEventElapsedTime(&milliseconds, start, end));
        std::printf("%.9g\n", milliseconds / 1e3 / runs);
        std::fflush(stdout);
    }
}
