/*
 * cuda_image: the kernels of this folder, compiled for the GPU, as bytes of the library.
 *
 * make_image.sh makes cuda_image.fatbin and cuda_image.ptx, which are kept in the tree, so that a
 * machine without CUDA's toolkit builds the same library; tests/kernels/image_fresh.sh fails when
 * they are older than the sources. The assembler includes them (cuda_image.c). To change a kernel:
 * change its .cu and its C twin, run the script, run the tests.
 */
#ifndef RFT_KERNEL_CUDA_IMAGE_H
#define RFT_KERNEL_CUDA_IMAGE_H

/* A fatbin: machine code for GPUs 8.x, 9.x and 10.x, and PTX for those to come. */
extern const unsigned char rft_cuda_image[];

/* The PTX alone, as a string: for drivers older than the machine code, which refuse the whole
 * fatbin. From CUDA 12.0 on they can compile it. */
extern const unsigned char rft_cuda_ptx[];

#endif
