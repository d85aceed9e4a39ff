# A machine with systemd on it, in namespaces of its own, that runs one script and is gone: sh boot.sh DIR SCRIPT, as root.
#
# Its root is an overlay of this machine's; /run, /tmp, /mnt, /dev, the cgroups and the network are new. DIR/opt has what is to be /opt there.
# What SCRIPT prints is in DIR/said. $BASE and $PACKAGES, the interpreter and its packages, are at /opt/python and /opt/packages.
set -eu
dir=$1 script=$2
mount --make-rprivate /
root=$dir/root
mkdir -p "$root" "$dir/layers"
mount -t tmpfs layers "$dir/layers"
mkdir "$dir/layers/upper" "$dir/layers/work"
mount -t overlay -o "lowerdir=/,upperdir=$dir/layers/upper,workdir=$dir/layers/work" machine "$root"
for place in run tmp mnt dev opt var/lib/kvstore etc/kvstore; do
    mkdir -p "$root/$place"
    mount -t tmpfs -o mode=755 new "$root/$place"
done
chmod 1777 "$root/tmp"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mkdir "$root/dev/pts" "$root/dev/shm" "$root/dev/mqueue" "$root/dev/hugepages" "$root/run/systemd" "$root/run/systemd/system" "$root/old"
mount -t tmpfs -o mode=1777,size=1g shm "$root/dev/shm"
for device in null zero full random urandom tty; do cp -a "/dev/$device" "$root/dev/$device"; done
ln -s /proc/self/fd "$root/dev/fd"
ln -s pts/ptmx "$root/dev/ptmx"
touch "$root/dev/console"

cp -r "$dir/opt/." "$root/opt/"
mkdir "$root/opt/python" "$root/opt/packages"
mount --bind "$BASE" "$root/opt/python"
mount --bind "$PACKAGES" "$root/opt/packages"
rm -rf "$root"/etc/systemd/system/*.wants
for unit in "$dir"/units/*; do cp -r "$unit" "$root/run/systemd/system/"; done
cp "$dir/kvstore.toml" "$root/etc/kvstore/"
cp "$script" "$root/opt/script"
touch "$root/opt/said"
cat >"$root/run/systemd/system/script.service" <<'U'
[Service]
Type=oneshot
TimeoutStartSec=60
StandardOutput=append:/opt/said
StandardError=append:/opt/said
ExecStart=-/bin/sh /opt/script
ExecStopPost=/bin/systemctl --no-block exit
U
cat >"$root/run/systemd/system/script.target" <<'U'
[Unit]
Requires=script.service
U
chroot "$root" useradd --system --no-create-home --home-dir /var/lib/kvstore kvstore 2>/dev/null || true
mkdir -m 700 "$root/mnt/nvme0"
chroot "$root" chown kvstore /mnt/nvme0
timeout -s KILL 90 unshare --mount --pid --net --fork --kill-child --cgroup --mount-proc="$root/proc" env -i container=other \
    PATH=/usr/sbin:/usr/bin:/sbin:/bin sh -c 'cd "$0" && pivot_root . old && cd / && umount -l /old && exec "$@"' \
    "$root" /lib/systemd/systemd --system --unit=script.target --log-level=warning </dev/null >"$dir/systemd" 2>&1 || true
cp "$root/opt/said" "$dir/said"
