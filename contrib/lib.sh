# shellcheck shell=bash
# Functions shared by the scripts in contrib and integration. Sourcing this file only sets
# variables.
# shellcheck disable=SC2034 # the scripts that source this file use the variables

# BERTH_SRC is the root of the checkout.
BERTH_SRC=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

need_root() { [ "$(id -u)" = 0 ] || die "needs root: sudo $0"; }

# --- packages and toolchain -----------------------------------------------------

# An installed Go that is older than go.mod requires takes this toolchain from the module proxy.
export GOTOOLCHAIN=go1.27.3

# Debian's and Ubuntu's names, the same in Debian 12 and 13 and Ubuntu 22.04 and 24.04.
BERTH_PACKAGES=(gcc libc6-dev pkg-config libseccomp-dev libisal-dev busybox-static iproute2 util-linux ca-certificates git)
# The tests also need CNI plugins, a firewall and another OCI runtime.
BERTH_TEST_PACKAGES=(containernetworking-plugins iptables crun)

install_packages() {
	local missing=() p
	for p in "$@"; do
		dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q ' installed$' || missing+=("$p")
	done
	[ ${#missing[@]} -gt 0 ] || return 0
	command -v apt-get >/dev/null || die "install these packages first: ${missing[*]}"
	say "installing ${missing[*]}"
	export DEBIAN_FRONTEND=noninteractive
	apt_get install -qy --no-install-recommends "${missing[@]}" 2>/dev/null ||
		{ apt_get update -q && apt_get install -qy --no-install-recommends "${missing[@]}"; } ||
		die "apt-get could not install ${missing[*]}"
}

# apt_get ARG… runs apt-get, and waits up to BERTH_APT_PATIENCE seconds while another apt holds a
# lock, as unattended-upgrades does on a new machine. DPkg::Lock::Timeout covers only dpkg's own
# lock.
apt_get() {
	local errors deadline=$((SECONDS + ${BERTH_APT_PATIENCE:-900})) told=
	until errors=$(LC_ALL=C apt-get -o DPkg::Lock::Timeout="${BERTH_APT_PATIENCE:-900}" "$@" 2>&1 >/dev/null); do
		if ! grep -qE 'Could not get lock|Unable to (lock|acquire)' <<<"$errors" || [ $SECONDS -ge $deadline ]; then
			printf '%s\n' "$errors" >&2
			return 1
		fi
		[ -n "$told" ] || say "waiting for another apt"
		told=1
		sleep "${BERTH_APT_PAUSE:-2}"
	done
}

# BERTH_CORPUS_PACKAGES are packages that tests turn into images. They have many small files, hard
# links, long paths and names in other scripts.
BERTH_CORPUS_PACKAGES=(tzdata git perl-base libc6 ncurses-term coreutils ca-certificates iso-codes)

# fetch_corpus downloads BERTH_CORPUS_PACKAGES into ${XDG_CACHE_HOME:-~/.cache}/berth-corpus and
# prints that directory. It does not update packages. It fails if a package cannot be downloaded.
fetch_corpus() {
	local dir=${XDG_CACHE_HOME:-$HOME/.cache}/berth-corpus p missing=()
	mkdir -p "$dir" || return
	for p in "${BERTH_CORPUS_PACKAGES[@]}"; do
		compgen -G "$dir/${p}_*.deb" >/dev/null || missing+=("$p")
	done
	if [ ${#missing[@]} -gt 0 ]; then
		command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return
		(cd "$dir" && { apt-get download -q "${missing[@]}" || { apt_get update -q && apt-get download -q "${missing[@]}"; }; }) >/dev/null 2>&1 || return
	fi
	echo "$dir"
}

# BERTH_CRIU_SUITES are suites of Debian with a CRIU for current kernels, in order of preference.
# CRIU 4.1.1 of trixie cannot dump internet sockets on Linux 6.16 and later.
BERTH_CRIU_SUITES=(sid forky trixie)

# fetch_criu prints the path of a CRIU for current kernels. Older releases of Debian have none, so
# it takes the packages of a newer release from the mirrors that this machine uses. It unpacks them
# with their libraries below ${XDG_CACHE_HOME:-~/.cache}/berth-criu and installs nothing. It fails
# if that is not possible.
fetch_criu() {
	local dir=${XDG_CACHE_HOME:-$HOME/.cache}/berth-criu suite
	if "$dir/criu" --version >/dev/null 2>&1; then echo "$dir/criu"; return; fi
	command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return
	for suite in "${BERTH_CRIU_SUITES[@]}"; do
		(unpack_criu "$dir" "$suite") >/dev/null 2>&1 && "$dir/criu" --version >/dev/null 2>&1 || continue
		echo "$dir/criu"
		return
	done
	return 1
}

# fetch_old_criu prints the path of a CRIU that is too old for berth: that of bookworm. It fails if
# that is not possible.
fetch_old_criu() {
	local dir=${XDG_CACHE_HOME:-$HOME/.cache}/berth-criu-old
	"$dir/criu" --version >/dev/null 2>&1 || (unpack_criu "$dir" bookworm) >/dev/null 2>&1
	"$dir/criu" --version >/dev/null 2>&1 && echo "$dir/criu"
}

# apt_apart DIR ARG… runs apt-get with lists and archives of its own in DIR. No package is installed
# there, so it fetches every library.
apt_apart() {
	local dir=$1
	shift
	mkdir -p "$dir"/state/lists "$dir"/cache/archives/partial
	: >"$dir/status"
	apt-get -q -o "Dir::State=$dir/state" -o "Dir::State::status=$dir/status" -o "Dir::Cache=$dir/cache" -o APT::Sandbox::User=root "$@"
}

# unpack_criu DIR SUITE unpacks CRIU of SUITE and its libraries into DIR/root and writes DIR/criu,
# which runs it. Call it in a subshell.
unpack_criu() {
	local dir=$1 work from deb
	set -e
	mkdir -p "$dir"
	work=$(mktemp -d "$dir/work.XXXXXX")
	# shellcheck disable=SC2064 # the name is known now
	trap "rm -rf '$work'" EXIT
	mkdir "$work/root"
	debian_sources "$2" >"$work/suite.sources"
	[ -s "$work/suite.sources" ]
	from=(-o "Dir::Etc::sourcelist=$work/suite.sources" -o Dir::Etc::sourceparts=-)
	apt_apart "$work" "${from[@]}" update
	apt_apart "$work" "${from[@]}" install -y --download-only --no-install-recommends criu
	for deb in "$work"/cache/archives/{criu,lib}*.deb; do dpkg-deb --extract "$deb" "$work/root"; done
	write_criu "$work/root" "$dir/root" "$work/criu"
	rm -rf "$dir/root"
	mv "$work/root" "$dir/root"
	mv "$work/criu" "$dir/criu"
}

# write_criu ROOT PATH FILE writes the program FILE, which runs the CRIU in the unpacked packages
# ROOT. PATH is ROOT's path when FILE runs.
write_criu() {
	local loader
	# Before trixie some libraries are in /lib, and their loader with them.
	loader=$(cd "$1" && find usr/lib lib -name 'ld-linux*' 2>/dev/null | head -1)
	[ -n "$loader" ] || return
	printf '#!/bin/sh\nexec "%s" --library-path "%s" "%s" "$@"\n' "$2/$loader" "$2/${loader%/*}:$2/usr/${loader%/*}" "$2/usr/sbin/criu" >"$3" &&
		chmod 0755 "$3"
}

# debian_sources SUITE prints the machine's apt sources of its own Debian release, with that release
# replaced by SUITE.
debian_sources() {
	local own file
	own=$(. /etc/os-release && [ "$ID" = debian ] && echo "$VERSION_CODENAME") || return
	[ -n "$own" ] || return
	for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
		# The suite is the second word after the options. Security updates have no sid.
		[ ! -f "$file" ] || sed -nE "s/^(deb +(\[[^]]*\] +)?[^ ]+ +)$own( .*)\$/\1$1\3/p" "$file"
	done
	for file in /etc/apt/sources.list.d/*.sources; do
		[ ! -f "$file" ] || awk -v RS= -v own="$own" -v suite="$1" '
			match($0, "(^|\n)Suites:[^\n]*") {
				if (substr($0, RSTART, RLENGTH) !~ "[ \t]" own "([ \t]|$)") next
				sub("(^|\n)Suites:[^\n]*", "\nSuites: " suite); sub("^\n", ""); print $0 "\n"
			}' "$file"
	done
}

# go_minor prints N of the installed go1.N, or 0.
go_minor() {
	local v
	v=$(GOTOOLCHAIN=local go version 2>/dev/null) || { echo 0; return; }
	[[ $v =~ go1\.([0-9]+) ]] && echo "${BASH_REMATCH[1]}" || echo 0
}

# need_go puts a Go toolchain that go.mod accepts first in PATH: the installed one, or GOTOOLCHAIN.
# Go 1.21 and later download it themselves. Older versions (1.19 in Debian 12, 1.18 in Ubuntu 22.04)
# can download it as a module.
need_go() {
	PATH=$PATH:/usr/local/go/bin # sudo drops it
	[ "$(go_minor)" -gt 0 ] || install_packages golang-go
	if [ "$(go_minor)" -ge 21 ]; then
		! (cd "$BERTH_SRC" && GOTOOLCHAIN=local go list -m >/dev/null 2>&1) || GOTOOLCHAIN=local
		GOROOT=$(go env GOROOT)
	else
		GOROOT=$(fetch_toolchain)
	fi || die "needs Go $(required_go), found $(GOTOOLCHAIN=local go version), and cannot download $GOTOOLCHAIN from the module proxy"
	export GOROOT PATH=$GOROOT/bin:$PATH GOTOOLCHAIN=local
	# Under sudo the checkout belongs to another user, so git refuses to read its revision.
	export GOFLAGS="${GOFLAGS:+$GOFLAGS }-buildvcs=false"
}

# required_go prints the version of Go that go.mod requires.
required_go() { awk '$1 == "go" {print $2}' "$BERTH_SRC/go.mod"; }

# module_dir MODULE VERSION downloads a Go module and prints the directory of its source.
module_dir() {
	local dir
	dir=$(cd / && go mod download -json "$1@$2" | sed -n 's/^\t"Dir": "\(.*\)",*$/\1/p')
	[ -n "$dir" ] && echo "$dir"
}

# fetch_toolchain prints the GOROOT of a toolchain downloaded by an old go.
fetch_toolchain() {
	local version dir
	version=v0.0.1-$GOTOOLCHAIN.linux-$(go env GOHOSTARCH)
	dir=$(module_dir golang.org/toolchain "$version") || return
	# Module zips carry no file modes. Newer go commands also set them after the download.
	chmod +x "$dir"/bin/* "$dir"/pkg/tool/*/* && echo "$dir"
}

# set_up installs and builds everything. Afterwards BERTH_BIN holds the binaries.
set_up() {
	install_packages "${BERTH_PACKAGES[@]}"
	need_go
	say "building berth with $(go version)"
	export BERTH_BIN=$BERTH_SRC/bin
	"$BERTH_SRC/contrib/build"
}

# need_nfpm builds bin/nfpm, which writes packages, if it is missing or older than its version's
# file. Tests of packages cannot build it, because they have no network to fetch modules.
need_nfpm() {
	local nfpm=$BERTH_SRC/bin/nfpm source=$BERTH_SRC/contrib/packaging/nfpm
	if [ -x "$nfpm" ] && [ "$nfpm" -nt "$source/go.mod" ]; then return; fi
	(cd "$source" && GOARCH='' CGO_ENABLED=0 go build -o "$nfpm" github.com/goreleaser/nfpm/v2/cmd/nfpm)
}

# need_arch prepares a build for $GOARCH, amd64 or arm64. Without GOARCH it is the machine's own
# architecture. It sets BERTH_ARCH to its name in Go and Debian, and BERTH_CPU to that of uname.
#
# For another architecture it sets CC to a cross compiler, and BERTH_SYSROOT to a directory with
# Debian's libraries for it. CC is a name in PATH, because Go puts CC into the built programs' IDs,
# and a directory in it would make them differ.
need_arch() {
	BERTH_ARCH=$(go env GOARCH) BERTH_SYSROOT=''
	case $BERTH_ARCH in
	amd64) BERTH_CPU=x86_64 ;;
	arm64) BERTH_CPU=aarch64 ;;
	*) die "berth is not built for $BERTH_ARCH" ;;
	esac
	[ "$BERTH_ARCH" != "$(go env GOHOSTARCH)" ] || return 0
	command -v "$BERTH_CPU-linux-gnu-gcc" >/dev/null || install_packages "gcc-${BERTH_CPU/_/-}-linux-gnu"
	BERTH_SYSROOT=${XDG_CACHE_HOME:-$HOME/.cache}/berth-sysroot-$BERTH_ARCH-$(built_using_here | sha256sum | cut -c1-12)
	[ -e "$BERTH_SYSROOT" ] || (unpack_sysroot) >/dev/null || die "cannot fetch Debian's libraries for $BERTH_ARCH"
	export PATH=$BERTH_SYSROOT/cross:$PATH CC=$BERTH_CPU-berth-gcc CGO_ENABLED=1
	export PKG_CONFIG_LIBDIR=$BERTH_SYSROOT/usr/lib/$BERTH_CPU-linux-gnu/pkgconfig PKG_CONFIG_SYSTEM_LIBRARY_PATH=/usr/lib/$BERTH_CPU-linux-gnu
}

# unpack_sysroot creates BERTH_SYSROOT from the suite that this machine uses. It installs nothing.
# Call it in a subshell.
unpack_sysroot() {
	local work deb arch=(-o "APT::Architecture=$BERTH_ARCH" -o "APT::Architectures=$BERTH_ARCH")
	set -e
	mkdir -p "${BERTH_SYSROOT%/*}"
	work=$(mktemp -d "$BERTH_SYSROOT.XXXXXX")
	# shellcheck disable=SC2064 # the name is known now
	trap "rm -rf '$work'" EXIT
	mkdir -p "$work/root/cross"
	apt_apart "$work" "${arch[@]}" update
	apt_apart "$work" "${arch[@]}" install -y --download-only --no-install-recommends libc6-dev libseccomp-dev libisal-dev
	for deb in "$work"/cache/archives/*.deb; do dpkg-deb --extract "$deb" "$work/root"; done
	[ -e "$work/root/lib" ] || ln -s usr/lib "$work/root/lib"
	for deb in "$work"/cache/archives/{libc6,libseccomp}-dev_*.deb; do
		dpkg-deb --show --showformat '${source:Package} ${source:Version}\n' "$deb"
	done | sort >"$work/root/built-using"
	# Without -B and -isystem, an older C library that comes with the cross compiler has priority.
	# The compiler's own headers stay first.
	printf '#!/bin/sh\nexec %s-linux-gnu-gcc --sysroot="%s" -B"%s" -isystem "%s" -isystem "%s" -isystem "%s" "$@"\n' "$BERTH_CPU" "$BERTH_SYSROOT" \
		"$BERTH_SYSROOT/usr/lib/$BERTH_CPU-linux-gnu" "$("$BERTH_CPU-linux-gnu-gcc" -print-file-name=include)" \
		"$BERTH_SYSROOT/usr/include/$BERTH_CPU-linux-gnu" "$BERTH_SYSROOT/usr/include" \
		>"$work/root/cross/$BERTH_CPU-berth-gcc"
	chmod 0755 "$work/root/cross/$BERTH_CPU-berth-gcc"
	mv "$work/root" "$BERTH_SYSROOT"
}

# built_programs prints the directory of the programs that contrib/build builds.
built_programs() { echo "bin${BERTH_SYSROOT:+/$BERTH_ARCH}"; }

# built_using prints name and version of the source packages whose static libraries are linked. It
# prints nothing where Debian's package manager is missing.
built_using() { if [ -n "$BERTH_SYSROOT" ]; then cat "$BERTH_SYSROOT/built-using"; else built_using_here; fi; }

built_using_here() {
	command -v dpkg-query >/dev/null || return 0
	dpkg-query -W -f '${source:Package} ${source:Version}\n' libc6-dev libseccomp-dev | sort
}

# has_isal succeeds if ISA-L's headers are installed.
has_isal() { echo '#include <isa-l/igzip_lib.h>' | "${CC:-cc}" -E -x c - >/dev/null 2>&1; }

# source_git runs git on the checkout even if it belongs to another user, as under sudo or in CI.
source_git() { git -c safe.directory="$BERTH_SRC" -C "$BERTH_SRC" "$@"; }

# build_releases builds the released versions that integration/upgrade compares with, because its
# tests have no network to fetch modules. It prints the versions that are missing in the checkout's
# history.
build_releases() {
	local version code
	while read -r version _; do
		case $version in '' | '#') continue ;; esac
		code=0
		"$BERTH_SRC/integration/upgrade/build" "$version" >/dev/null || code=$?
		case $code in
		0) ;;
		77) printf 'NOT TESTED\tupgrade from %s: this checkout has no history to build it from\n' "$version" ;;
		*) return "$code" ;;
		esac
	done <"$BERTH_SRC/integration/upgrade/versions"
}

# note_skips OUTPUT lists the tests that a run skipped, each with the reason it logged last.
note_skips() {
	awk '/^=== (RUN|NAME|CONT) / { test = $3 }
		/^ *[a-z_0-9]+\.go:[0-9]+: / { said[test] = $0; sub(/^ *[a-z_0-9]+\.go:[0-9]+: /, "", said[test]) }
		/^ *--- SKIP/ { print $0 ": " said[$3] }' "$1"
}

# note_failures OUTPUT prints the output of each failed test and failed build, at most 60 lines for
# each. go test -v prints a test's output before its result and mixes parallel tests.
note_failures() {
	awk 'function show(name, i) {
			for (i = 1; i <= n[name]; i++)
				if (i <= 20 || i > n[name] - 40) print line[name, i]
				else if (i == 21) print "    … " n[name] - 60 " lines omitted …"
			n[name] = 0
		}
		/^=== (RUN|NAME|CONT|PAUSE) / { test = $3; next }
		/^ *--- (PASS|SKIP): / { n[$3] = 0; next }
		/^ *--- FAIL: / { print; show($3); failed = 1; next }
		/^(PASS|FAIL)$/ { test = ""; next }
		/^FAIL\t/ { print; show(""); failed = 1 }
		/^(ok  |FAIL|\?   )\t/ { n[""] = 0; test = ""; next }
		/^# / { test = "build" }
		/^(panic|fatal error): / { test = "" } # of the package: its test has its result already
		{ line[test, ++n[test]] = $0 }
		END { show("build"); if (!failed) show("") }' "$1"
}

# --- private machines -----------------------------------------------------------
#
# machine_run CMD… runs CMD in its own mount, PID, network, UTS and IPC namespaces with an empty
# /run. Its cgroups are below a unique name, exported as BERTH_MACHINE. Nothing done inside reaches
# the host. When CMD ends or this shell dies, the kernel kills the rest with the namespace's init.
#
# The cgroups' name holds the PID and start time of its owner. machine_sweep uses them to find the
# leftovers of aborted runs.

MACHINE_PREFIX=berth-machine-

# starttime PID prints field 22 of /proc/PID/stat. It counts from the end of the name, which may
# contain blanks.
starttime() {
	local stat
	read -r stat 2>/dev/null <"/proc/$1/stat" || return 1
	read -ra stat <<<"${stat##*) }"
	echo "${stat[19]}"
}

# owned PATH prints PATH.PID-STARTTIME, the name of a directory that only this shell uses. It
# removes the directories of shells that have ended.
owned() {
	local left owner
	for left in "$1".*; do
		owner=${left##*.}
		[ ! -d "$left" ] || [ "$(starttime "${owner%-*}")" = "${owner#*-}" ] || rm -rf "$left"
	done
	echo "$1.$$-$(starttime $$)"
}

# cgroups_named NAME prints the directory of NAME, which may be a pattern, in every mounted
# hierarchy, v1 or v2.
cgroups_named() {
	local dir
	# shellcheck disable=SC2231 # NAME may be a pattern
	for dir in /sys/fs/cgroup/$1 /sys/fs/cgroup/*/$1; do
		[ -d "$dir" ] && echo "$dir"
	done
	return 0
}

# cgroups_remove NAME kills the processes in these cgroups and removes the cgroups.
cgroups_remove() {
	local dir pid
	for _ in {1..100}; do
		for dir in $(cgroups_named "$1"); do
			find "$dir" -name cgroup.procs -exec cat {} + 2>/dev/null | while read -r pid; do
				[ "$pid" = 0 ] || kill -KILL "$pid" 2>/dev/null
			done
			find "$dir" -depth -type d -exec rmdir {} + 2>/dev/null
		done
		[ -z "$(cgroups_named "$1")" ] && return 0
		sleep 0.1 # a killed process leaves its cgroup when it is reaped
	done
	echo "cannot remove the cgroups $1" >&2
	return 1
}

# machine_sweep removes the cgroups of aborted runs, whose owner has ended.
machine_sweep() {
	local name owner
	for name in $(cgroups_named "$MACHINE_PREFIX*" | sed 's,.*/,,' | sort -u); do
		owner=${name#"$MACHINE_PREFIX"}
		[ "$(starttime "${owner%-*}")" = "${owner#*-}" ] && continue
		echo "removing $name, left by an aborted run"
		cgroups_remove "$name"
	done
}

# cgroup_run CMD… runs CMD with a unique name for cgroups in BERTH_MACHINE. When CMD ends it kills
# the processes in these cgroups and removes the cgroups. CMD dies with this shell.
cgroup_run() {
	local code=0 owner=$BASHPID # $$ would be the parent shell in $(…)
	machine_sweep
	BERTH_MACHINE=$MACHINE_PREFIX$owner-$(starttime "$owner")
	export BERTH_MACHINE
	setpriv --pdeathsig KILL "$@" || code=$?
	cgroups_remove "$BERTH_MACHINE" || code=1
	return "$code"
}

machine_run() {
	cgroup_run unshare --mount --pid --net --uts --ipc --fork --kill-child=KILL \
		bash -c '. "$1"; shift; machine_init "$@"; exit' machine "$BERTH_SRC/contrib/lib.sh" "$@"
}

# join_cgroups NAME moves this shell to the cgroup NAME of the v2 hierarchy and of v1's freezer. The
# daemon creates cgroups for CNI plugins below its own.
join_cgroups() {
	local hierarchy
	for hierarchy in /sys/fs/cgroup{,/unified,/freezer}; do
		[ -e "$hierarchy/cgroup.procs" ] || continue
		mkdir -p "$hierarchy/$1"
		echo 0 >"$hierarchy/$1/cgroup.procs"
	done
}

# machine_init CMD… is PID 1 of a machine. bash reaps orphans as an init must.
machine_init() {
	local resolv
	set -e
	resolv=$(cat /etc/resolv.conf 2>/dev/null || true)
	mount -t proc proc /proc
	mount -t tmpfs -o mode=0755 berth-run /run
	mkdir -p /run/lock /run/tmp
	# A mount namespace does not protect device nodes from chmod, which a test tries on /dev/null.
	mknod -m 0666 /run/null c 1 3
	mount --bind /run/null /dev/null
	# systemd-resolved keeps the file below /run, which the tmpfs hides.
	if [ -L /etc/resolv.conf ] && [ ! -e /etc/resolv.conf ]; then
		mkdir -p "$(dirname "$(readlink -m /etc/resolv.conf)")"
		printf '%s\n' "$resolv" >"$(readlink -m /etc/resolv.conf)"
	fi
	mount --make-rshared / # as systemd does, so that later mounts reach idle launchers
	hostname berth-machine
	ip link set lo up
	join_cgroups "$BERTH_MACHINE/self"
	echo 1 >/proc/sys/net/ipv4/ip_forward
	export TMPDIR=/run/tmp # on a tmpfs, which overlayfs accepts as an upper layer
	unset GOTMPDIR         # testing.T.TempDir prefers it
	unset {http,https,all,no}_proxy {HTTP,HTTPS,ALL,NO}_PROXY # proxies are not reachable from here
	set +e
	"$@"
}

# start_registry DIR starts a registry on loopback that serves the demo's image. It sets
# REGISTRY_PID and IMAGE. The registry ends with this shell, which holds its standard input.
start_registry() {
	mkfifo "$1/registry" "$1/registry.stdin"
	exec 9<>"$1/registry.stdin"
	"$BERTH_BIN/demoregistry" <"$1/registry.stdin" 9>&- >"$1/registry" &
	REGISTRY_PID=$!
	read -r IMAGE <"$1/registry" || die "the registry did not start"
}
