FROM debian:bookworm AS build
COPY deploy/packages /packages
RUN /packages/install build && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN cmake -S /src -B /build -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DQUANTD_BUILD_TESTS=OFF \
    && cmake --build /build --target quantd quantctl \
    && install -s -D -t /out/usr/bin /build/server/quantd \
      /build/client/cli/quantctl

FROM debian:bookworm-slim
COPY deploy/packages /packages
RUN /packages/install runtime \
    && rm -rf /packages /var/lib/apt/lists/* /var/cache/apt/archives/*.deb \
    && useradd --system --user-group --home-dir /var/lib/quantd \
      --no-create-home --shell /usr/sbin/nologin quantd \
    && install -d -o quantd -g quantd -m 0750 /var/lib/quantd
COPY --from=build /out/ /
# A container's loopback cannot be reached from outside of it, so quantd listens
# on all of the container's addresses, in plaintext: publish the ports to
# loopback or to a private network only. Flags win over these.
ENV QUANTD_LISTEN=0.0.0.0:8430 \
    QUANTD_INSECURE_LISTEN=true \
    QUANTD_METRICS_LISTEN=0.0.0.0:8431 \
    QUANTD_STORE=sqlite:/var/lib/quantd/quantd.db
USER quantd
VOLUME /var/lib/quantd
EXPOSE 8430 8431
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
  CMD ["quantctl", "health"]
ENTRYPOINT ["quantd"]
