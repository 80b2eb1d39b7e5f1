/* All kernels as one: what make_image.sh compiles into cuda_image.c. */
#include "kernels/cast.cu"
#include "kernels/delta_apply.cu"
#include "kernels/delta_exchange.cu"
#include "kernels/digest.cu"
#include "kernels/master.cu"
#include "kernels/pack.cu"
