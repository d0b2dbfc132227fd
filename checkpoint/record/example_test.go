package record_test

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"berth/checkpoint/record"
)

// A daemon records a pod before it makes the pod's network. The next daemon finds the record and
// undoes what it names.
func Example() {
	type pod struct {
		NetNS string `json:"netns"`
	}
	state, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(state)

	const kind, version = "pod", 1
	dir, err := record.OpenDir(filepath.Join(state, "pods"), kind, version, record.Process)
	if err != nil {
		log.Fatal(err)
	}
	if err := dir.Write("4f1c", pod{NetNS: "/run/berth/netns/4f1c"}); err != nil {
		log.Fatal(err)
	}
	// Now the namespace may be made. Here the daemon is killed, and another one starts.

	dir, err = record.OpenDir(filepath.Join(state, "pods"), kind, version, record.Process)
	if err != nil {
		log.Fatal(err)
	}
	damaged, err := dir.Load(func(name string, _ int, body []byte) error {
		var found pod
		if err := json.Unmarshal(body, &found); err != nil {
			return err
		}
		fmt.Println(name, found.NetNS)
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("damaged records:", len(damaged))
	if err := dir.Remove("4f1c"); err != nil { // after the namespace is gone
		log.Fatal(err)
	}
	// Output:
	// 4f1c /run/berth/netns/4f1c
	// damaged records: 0
}

// A damaged record is set aside, and the others are loaded.
func ExampleDir_Load() {
	path, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(path)
	dir, err := record.OpenDir(path, "pod", 1, record.Process)
	if err != nil {
		log.Fatal(err)
	}
	for _, name := range []string{"4f1c", "90ab"} {
		if err := dir.Write(name, struct{}{}); err != nil {
			log.Fatal(err)
		}
	}
	if err := os.Truncate(filepath.Join(path, "90ab.record"), 10); err != nil {
		log.Fatal(err)
	}

	damaged, err := dir.Load(func(name string, _ int, _ []byte) error {
		fmt.Println("loaded", name)
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, record := range damaged {
		place, err := filepath.Rel(path, record.Path)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("damaged", record.Name, "is now", place)
	}
	// Output:
	// loaded 4f1c
	// damaged 90ab is now set-aside/90ab.record.0
}
