# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by the scripts here: finding Python, and uv in a small environment of its own.

find_python() { # print a Python >= 3.11, or fail
    local candidate
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

install_command() { # how this system installs Debian packages
    echo "$([[ $(id -u) == 0 ]] || echo 'sudo ')apt-get install -y $*"
}

UV=.tools/uv/bin/uv

PIP_LOG=.tools/pip.log

bootstrap_uv() { # uv installs a locked set of packages in seconds, where pip takes a minute
    [[ -x $UV ]] && return
    local python
    python=$(find_python)
    rm -rf .tools/uv "$PIP_LOG"
    mkdir -p .tools
    # Shown only when it failed by itself: Ctrl-C ends this shell too, and Python's last words are not of interest then.
    "$python" -m venv .tools/uv 2>"$PIP_LOG" || { cat "$PIP_LOG" >&2; return 1; }
    if ! pip_install .tools/uv/bin/python --require-hashes -r tools/uv.txt; then
        rm -rf .tools/uv
        return 1
    fi
    rm -f "$PIP_LOG"
}

pip_install() { # into which Python, arguments of `pip install`
    # What pip says goes into a log: it is many lines, and the last one is not the reason.
    local pip=(.tools/uv/bin/python -m pip --disable-pip-version-check --log "$PIP_LOG" --python "$1")
    shift
    # A registry that does not answer shall show in seconds; one that does may be as slow as it likes.
    "${pip[@]}" --timeout 5 --retries 0 install "$@" >/dev/null 2>&1 ||
        { registry_answers && "${pip[@]}" --timeout 60 --retries 3 install "$@" >/dev/null 2>&1; }
}

registry_answers() { # whether pip got to see a list of packages
    ! grep -q 'Could not fetch URL' "$PIP_LOG"
}

registry_trouble() { # what is wrong after a pip_install that failed, in one line
    if registry_answers; then
        echo "The Python package registry answers, but not all packages could be installed."
    else
        echo "No Python package registry is reachable."
    fi
}

uv_settings() { # uv does not read pip's settings: hand over a mirror and its certificates
    local pip=(.tools/uv/bin/python -m pip --disable-pip-version-check config get)
    local index certificates
    index=${PIP_INDEX_URL:-$("${pip[@]}" global.index-url 2>/dev/null || true)}
    certificates=${PIP_CERT:-$("${pip[@]}" global.cert 2>/dev/null || true)}
    [[ -z $index ]] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
    [[ -z $certificates ]] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$certificates}"
    # The machine's own list of authorities, as pip and Go use it: a company's proxy may have one of its own.
    export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"
    # The cache may lie on another file system, where uv would warn that it cannot link.
    export UV_LINK_MODE="${UV_LINK_MODE:-copy}"
}
