FROM debian:bookworm AS build
COPY deploy/packages /packages
RUN /packages/install build && rm -rf /var/lib/apt/lists/*
# With the path and the language of a build, and the ccache that it filled in
# /root/.cache/ccache, nothing is compiled again.
ARG SOURCE=/src
ARG LANG=C.UTF-8
COPY . $SOURCE
RUN cd "$SOURCE" \
    && cmake --preset release -DQUANTD_BUILD_TESTS=OFF \
    && cmake --build --preset release --target quantd quantctl \
    && install -s -D -t /out/usr/bin build/release/server/quantd \
      build/release/client/cli/quantctl

FROM debian:bookworm-slim
COPY deploy/packages /packages
# The number is for runAsNonRoot of Kubernetes, which does not trust names.
RUN /packages/install runtime \
    && rm -rf /packages /var/lib/apt/lists/* /var/cache/apt/*.bin \
      /var/cache/apt/archives/*.deb /var/cache/debconf/*-old /var/log/apt \
      /var/log/dpkg.log \
    && groupadd --gid 8430 quantd \
    && useradd --uid 8430 --gid 8430 --home-dir /var/lib/quantd \
      --no-create-home --shell /usr/sbin/nologin quantd \
    && install -d -o quantd -g quantd -m 0750 /var/lib/quantd /run/quantd
COPY --from=build /out/ /
# A container's loopback cannot be reached from outside of it, so quantd listens
# on all of the container's addresses, in plaintext: publish the ports to
# loopback or to a private network only. The socket is for quantctl beside it,
# and stays plaintext when the port has TLS. Flags win over these, and these
# over the keys of a file for --config.
ENV QUANTD_LISTEN=0.0.0.0:8430,unix:/run/quantd/quantd.sock \
    QUANTD_INSECURE_LISTEN=true \
    QUANTD_METRICS_LISTEN=0.0.0.0:8431 \
    QUANTD_STORE=sqlite:/var/lib/quantd/quantd.db \
    QUANTD_SERVER=unix:/run/quantd/quantd.sock
USER 8430:8430
# What is written, also where the rest is read-only.
VOLUME /var/lib/quantd /run/quantd
EXPOSE 8430 8431
# Over the socket, also where callers need a certificate: quantd calls its other
# ports itself, and is not healthy when one does not answer.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
  CMD ["quantctl", "health"]
ENTRYPOINT ["quantd"]
