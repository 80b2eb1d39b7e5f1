/*
 * Libraries that are called libcuda.so.1 and are not a driver that refit can use: the toolkit's
 * stub before 12.0 and since, a driver for CUDA 11.4, and something else. CMakeLists.txt makes one
 * of each.
 */
extern const int absent_cuda;
const int absent_cuda = 1;

#if defined ABSENT_CUDA_old_stub || defined ABSENT_CUDA_old_driver
int cuDriverGetVersion(int *version);

int cuDriverGetVersion(int *version)
{
    *version = 11040;
#ifdef ABSENT_CUDA_old_stub
    return 34;
#else
    return 0;
#endif
}
#endif

#ifdef ABSENT_CUDA_stub
int cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long long flags,
                        int *found);

int cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long long flags,
                        int *found)
{
    (void)symbol;
    (void)function;
    (void)version;
    (void)flags;
    (void)found;
    return 34;
}
#endif
