# An image with the book's environment, which opens the chapters in JupyterLab:
#   docker build -t derived-attention . && docker run --rm -p 8888:8888 derived-attention
# With a GPU: docker build --build-arg TORCH=pip ..., and docker run --gpus all ...
FROM python:3.11-slim-bookworm
ARG TORCH=cpu
ENV TORCH=$TORCH PIP_NO_CACHE_DIR=1
RUN apt-get update \
 && apt-get install -y --no-install-recommends git make \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home reader \
 && install --directory --owner=reader /srv/derived-attention
USER reader
WORKDIR /srv/derived-attention
# Copy first what the installation needs, so that a changed page does not cause a new installation.
COPY --chown=reader Makefile pyproject.toml constraints.txt package.json package-lock.json README.md LICENSE ./
COPY --chown=reader _ext/environment.py _ext/
COPY --chown=reader src src
RUN make install
COPY --chown=reader . .
EXPOSE 8888
CMD ["make", "lab", "LAB=--ip=0.0.0.0 --no-browser"]
