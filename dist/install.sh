#!/bin/sh
# Installs Shoal from the directory that this file was unpacked into. Needs no network.
#
#   tar xf shoal-VERSION-linux-ARCH.tar.gz && sudo shoal-VERSION-linux-ARCH/install.sh
#
# Running it again upgrades: a running daemon keeps its program until it is restarted, and sandboxes outlive that.

set -eu

usage() {
    cat <<'EOF'
Usage: install.sh [--prefix DIR] [--no-service] [--uninstall]

  --prefix DIR   Install below DIR [default: /usr/local]
  --no-service   Do not install the systemd unit
  --uninstall    Remove what this script installs; keep the data in /var/lib/shoal and the settings in /etc/shoal
EOF
}

fail() {
    echo "install.sh: $1" >&2
    exit 1
}

prefix=/usr/local
service=yes
uninstall=no
while [ $# -gt 0 ]; do
    case $1 in
        --prefix) [ $# -gt 1 ] || fail "--prefix needs a directory"; prefix=$2; shift ;;
        --prefix=*) prefix=${1#--prefix=} ;;
        --no-service) service=no ;;
        --uninstall) uninstall=yes ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
    shift
done
case $prefix in
    /*) ;;
    *) fail "--prefix must be an absolute path, got \`$prefix\`" ;;
esac
# Without systemd there is nothing that would read the unit.
[ -d /run/systemd/system ] || service=no
units=/etc/systemd/system
unit=$units/shoal.service

if [ "$uninstall" = yes ]; then
    if [ "$service" = yes ] && [ -e "$unit" ]; then
        systemctl disable --now shoal
        rm -f "$unit"
        systemctl daemon-reload
    fi
    rm -f "$prefix/bin/shoal" "$prefix/share/bash-completion/completions/shoal" \
        "$prefix/share/zsh/site-functions/_shoal" "$prefix/share/fish/vendor_completions.d/shoal.fish"
    rm -rf "$prefix/share/doc/shoal"
    echo "removed Shoal from $prefix; its data stays in /var/lib/shoal"
    exit 0
fi

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
[ "$(uname -s)" = Linux ] || fail "Shoal runs on Linux only"
[ -f "$here/bin/shoal" ] || fail "$here/bin/shoal is missing: run this file where the archive was unpacked"
(cd "$here" && sha256sum --check --quiet SHA256SUMS) || fail "the files do not match SHA256SUMS: unpack the archive again"
version=$("$here/bin/shoal" --version) || fail "the program does not run on this machine ($(uname -m))"

if [ "$service" = yes ] && [ "$(id -u)" -ne 0 ]; then
    fail "needs root: run it with sudo, or install elsewhere with --prefix DIR --no-service"
fi

# Under another name first: a program that is running cannot be overwritten, and nobody finds half of one.
put() {
    mkdir -p "$(dirname -- "$3")"
    rm -f "$3.new"
    cp "$2" "$3.new"
    chmod "$1" "$3.new"
    mv -f "$3.new" "$3"
}

put 755 "$here/bin/shoal" "$prefix/bin/shoal"
put 644 "$here/completions/shoal.bash" "$prefix/share/bash-completion/completions/shoal"
put 644 "$here/completions/_shoal" "$prefix/share/zsh/site-functions/_shoal"
put 644 "$here/completions/shoal.fish" "$prefix/share/fish/vendor_completions.d/shoal.fish"
rm -rf "$prefix/share/doc/shoal"
mkdir -p "$prefix/share/doc"
cp -R "$here/doc" "$prefix/share/doc/shoal"
if [ "$service" = yes ]; then
    sed "s|/usr/local/|$prefix/|g" "$here/shoal.service" >"$unit.new"
    chmod 644 "$unit.new"
    mv -f "$unit.new" "$unit"
    systemctl daemon-reload
fi

echo "installed $version in $prefix"
if [ "$service" = no ]; then
    echo "check this machine with \`shoal doctor\`, then run \`shoal run -- echo hello\`"
elif systemctl is-active --quiet shoal; then
    echo "restart the daemon with \`systemctl restart shoal\`; sandboxes keep running"
else
    echo "check this machine with \`shoal doctor\`, then start the daemon with \`systemctl enable --now shoal\`"
fi
