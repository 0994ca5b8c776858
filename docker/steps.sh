#!/bin/sh
# The steps of docker/Dockerfile: `sh steps.sh STEP [ARGUMENT...]`, as root, in the image that is being built.
set -eu

ENVIRONMENT=/opt/tritonforge
SOURCE=/source
SBOM=/usr/share/sbom/tritonforge.cdx.json

# Debian packages, without what they only recommend, and without their lists and caches.
packages() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq -y --no-install-recommends "$@"
    rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log /var/log/alternatives.log \
        /usr/share/doc/* /usr/share/man/* /usr/share/locale/*
}

# pip install of this project with EXTRAS; requirements/serve.txt holds every version down.
pip_install() {
    python=$1 extras=$2
    shift 2
    "$python" -m pip install --quiet --no-cache-dir --disable-pip-version-check --root-user-action=ignore \
        -c "$SOURCE/requirements/serve.txt" "$@" "$SOURCE[$extras]"
}

# Fails when something was installed in a version that the pinned list does not have.
only_pinned() {
    "$1" -m pip freeze --disable-pip-version-check | grep -v '^tritonforge' >/tmp/installed
    normal='s/^\([^=]*\)/\L\1/; s/[_.]/-/g'
    sed "$normal" "$SOURCE/requirements/serve.txt" >/tmp/pinned
    if sed "$normal" /tmp/installed | grep -vxFf /tmp/pinned; then
        echo "steps.sh: these are not in requirements/serve.txt" >&2
        exit 1
    fi
    rm /tmp/installed /tmp/pinned
}

# The Python environment that serves, as small as it gets: no pip, no tests of packages, no C headers.
environment() {
    python3.11 -m venv "$ENVIRONMENT"
    pip_install "$ENVIRONMENT/bin/python" "$1"
    only_pinned "$ENVIRONMENT/bin/python"
    "$ENVIRONMENT/bin/python" -m pip check
    "$ENVIRONMENT/bin/python" -m pip uninstall --quiet -y setuptools pip
    packages_of=$ENVIRONMENT/lib/python3.11/site-packages
    find "$packages_of" -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
    rm -rf "$packages_of/openvino/include" "$packages_of/openvino/cmake" "$packages_of/numpy/core/include"
    "$ENVIRONMENT/bin/tritonforge" --version
}

# The account, the bill of materials, and no programs that raise privileges.
finish() {
    groupadd --gid 10001 tritonforge
    useradd --uid 10001 --gid 10001 --home-dir /tmp --shell /usr/sbin/nologin --no-create-home tritonforge
    mkdir -p /release "$(dirname "$SBOM")"
    python3.11 /mnt/sbom.py "$ENVIRONMENT/lib/python3.11/site-packages" >"$SBOM"
    find / -xdev -type f -perm /6000 -exec chmod a-s {} +
    chmod -R go-w "$ENVIRONMENT"
}

# Into the Python of NVIDIA's image, which has tritonserver and TensorRT already.
into_base() {
    rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
    pip_install python3 "$1" -c "$SOURCE/requirements/gpu.txt"
    rm -rf "$SOURCE"
    groupadd --gid 10001 tritonforge
    useradd --uid 10001 --gid 10001 --home-dir /tmp --shell /usr/sbin/nologin --no-create-home tritonforge
    mkdir -p /release "$(dirname "$SBOM")"
    python3 /mnt/sbom.py "$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >"$SBOM"
    find / -xdev -type f -perm /6000 -exec chmod a-s {} +
}

step=$1
shift
case $step in
packages | environment | finish) "$step" "$@" ;;
into-base) into_base "$@" ;;
*)
    echo "steps.sh: unknown step $step" >&2
    exit 2
    ;;
esac
