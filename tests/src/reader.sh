# The shell of someone who reads a page and types its examples, in a world of their own: reader.rs starts it as the first
# process of new mount, network and pid namespaces, so that everybody may listen on the port that the page names, and keep
# things in the directory that it names. Arguments: the test's own directory.
#
# Reads lines `how file` from stdin, runs each file in this same shell, and answers with the exit code. `paste` leaves at
# the first failure, as nobody goes on after one; `type` lets the next file see `$?`.
set -eu
home=$1

ip link set lo up
# The page says /var/lib/shoal; the machine's own /var/lib is seen through, and not written to. What is on top has `shoal` as a
# link, so that ranges of ids are claimed in the name of a directory that daemons outside of this world can see too.
ln -s "$home/data" "$home/var-lib/shoal"
mount -t overlay overlay -o "lowerdir=/var/lib,upperdir=$home/var-lib,workdir=$home/var-lib-work" /var/lib
cd "$home/work"
set +e

# Kept away from what the examples start, so that nothing of theirs holds the test's pipes open.
exec 8<&0 9>&1 </dev/null >/dev/null
code=0
while read -r -u 8 how file; do
  case $how in
    paste)
      set -e
      . "$file" >"$file.out" 2>&1 8<&- 9>&-
      set +e
      code=0
      ;;
    type)
      (exit "$code")
      . "$file" >"$file.out" 2>&1 8<&- 9>&-
      code=$?
      ;;
  esac
  echo "$code" >&9
done
