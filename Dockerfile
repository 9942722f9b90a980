# An image for training on CPUs; runs/ then has the report:
#   docker build -t sherd . && docker run --rm -v "$PWD/runs:/home/trainer/runs" sherd train gpt --steps 50
#
# No --shm-size is needed. Docker gives a container 64 MB of /dev/shm, and sherd uses none of it: ranks share memory
# through memfd, which has no file and counts against the container's memory limit alone.
FROM python:3.11-slim

WORKDIR /sherd

# An index with CPU builds of torch, in the form pip's --extra-index-url takes. Without it pip takes what its default
# index has for the pinned version, which on x86-64 may be a build with gigabytes of CUDA libraries: larger, not wrong.
ARG TORCH_INDEX=""

# torch by itself and first: a change of the source then does not install it anew. The constraints keep its version.
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch numpy \
    && python -c "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda)"

COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt '.[report,live]'

# Ranks need no privileges.
RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer

ENTRYPOINT ["sherd"]
CMD ["--help"]
