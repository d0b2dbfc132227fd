package memory

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opencontainers/cgroups"
)

// noLimit and greater values mean no limit on cgroup v1. The kernel's default is a little below
// 2^63.
const noLimit = math.MaxInt64 &^ (1<<20 - 1)

// OwnLimit returns the smallest memory limit, in bytes, of this process's cgroup and its ancestors.
// It returns 0 if there is no limit or no memory controller. root is the directory that contains
// proc and sys, "/" outside tests.
func OwnLimit(root string) (int64, error) {
	paths, err := cgroups.ParseCgroupFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return 0, fmt.Errorf("find own cgroup: %w", err)
	}
	mount := filepath.Join(root, "sys/fs/cgroup")
	if path, ok := paths["memory"]; ok { // v1: memory.stat includes the limits of ancestors
		return ignoreMissing(limitV1(filepath.Join(mount, "memory", path, "memory.stat")))
	}
	path, ok := paths[""]
	if !ok {
		return 0, nil
	}
	var least int64
	for ; ; path = filepath.Dir(path) {
		limit, err := ignoreMissing(limitV2(filepath.Join(mount, path, "memory.max"))) // the root cgroup has no such file
		if err != nil {
			return 0, err
		}
		if limit > 0 && (least == 0 || limit < least) {
			least = limit
		}
		if path == "/" || path == "." {
			return least, nil
		}
	}
}

func limitV1(stat string) (int64, error) {
	f, err := os.Open(stat)
	if err != nil {
		return 0, fmt.Errorf("read memory limit: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if text, ok := strings.CutPrefix(lines.Text(), "hierarchical_memory_limit "); ok {
			limit, err := parse(stat, text)
			if limit >= noLimit {
				limit = 0
			}
			return limit, err
		}
	}
	return 0, lines.Err()
}

func limitV2(file string) (int64, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0, fmt.Errorf("read memory limit: %w", err)
	}
	text := strings.TrimSpace(string(data))
	if text == "max" {
		return 0, nil
	}
	return parse(file, text)
}

func parse(file, text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read memory limit %s: %w", file, err)
	}
	return n, nil
}

func ignoreMissing(limit int64, err error) (int64, error) {
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	return limit, err
}
