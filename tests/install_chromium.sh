#!/bin/sh
# Sees to it that the tests find a headless Chromium on the PATH. Does nothing if there is one.
# By apt-get, as root or with sudo.
set -eu

for name in chromium-headless-shell chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

by_apt() {
    command -v apt-get >/dev/null 2>&1 || return 1
    # The shell alone is a third of the size; older distributions have the browser only.
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium-headless-shell \
        || as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium
}

by_apt || { as_root apt-get update && by_apt; } || {
    echo "no Chromium: install it (Debian: apt-get install chromium-headless-shell)" >&2
    exit 1
}
