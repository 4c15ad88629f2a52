#!/bin/sh
# Installs what tests start besides Python, where that is missing and can be installed: PROGRAM PACKAGE a line.
# Never fails: a test whose program is missing is skipped, and says which package has it.

missing=""
while read -r program package; do
    ls $program >/dev/null 2>&1 || missing="$missing $package"
done <<LIST
/usr/lib/postgresql/*/bin/initdb postgresql
/usr/lib/python3/dist-packages/pyfuse3*.so python3-pyfuse3
/usr/bin/fusermount3 fuse3
LIST

[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing && exit 0
fi
echo "not installed:$missing; the tests that need it are skipped (as root: apt-get install$missing)"
exit 0
