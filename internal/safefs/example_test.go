package safefs_test

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"os"
	"path/filepath"

	"berth/internal/safefs"
)

// A container has replaced its /etc/passwd by a link to a file of the host. The link is followed
// inside the container's root, where that file does not exist.
func Example() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Mkdir(filepath.Join(dir, "etc"), 0o755); err != nil {
		log.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "etc/group"), []byte("root:x:0:"), 0o644); err != nil {
		log.Fatal(err)
	}
	if err := os.Symlink("/proc/self/environ", filepath.Join(dir, "etc/passwd")); err != nil {
		log.Fatal(err)
	}

	root, err := safefs.OpenRoot(dir)
	if err != nil {
		log.Fatal(err)
	}
	defer root.Close()

	const limit = 1 << 20
	group, err := safefs.ReadFile(root, "/etc/group", limit)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", group)

	_, err = safefs.ReadFile(root, "/etc/passwd", limit)
	fmt.Println("passwd is missing:", errors.Is(err, fs.ErrNotExist))
	// Output:
	// root:x:0:
	// passwd is missing: true
}

// A mount point is made at /data, where the image has a link out of its root. The new directory is
// inside the root.
func ExampleMaker_MkdirAll() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Symlink("../../../srv/database", filepath.Join(dir, "data")); err != nil {
		log.Fatal(err)
	}

	root, err := safefs.OpenRoot(dir)
	if err != nil {
		log.Fatal(err)
	}
	defer root.Close()

	made, err := safefs.Maker{Perm: 0o755}.MkdirAll(root, "/data")
	if err != nil {
		log.Fatal(err)
	}
	defer made.Close()
	fmt.Println(made.Path())
	// Output: srv/database
}

// A walk does not leave the tree, and follows no link.
func ExampleWalk() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.MkdirAll(filepath.Join(dir, "var/log"), 0o755); err != nil {
		log.Fatal(err)
	}
	if err := os.Symlink("/", filepath.Join(dir, "var/log/host")); err != nil {
		log.Fatal(err)
	}

	root, err := os.Open(dir)
	if err != nil {
		log.Fatal(err)
	}
	defer root.Close()
	walk, err := safefs.NewWalk(root, true)
	if err != nil {
		log.Fatal(err)
	}
	defer walk.Close()
	for {
		entry, err := walk.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(entry.Name, entry.Dir)
	}
	fmt.Println("skipped:", walk.Incomplete())
	// Output:
	// var true
	// log true
	// host false
	// skipped: <nil>
}
