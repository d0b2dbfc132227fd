package cni_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"os"
	"path/filepath"

	"berth/cni"
)

// node makes the directories of a node with one network. Its plugin is a shell script that assigns
// a fixed address and makes no interface.
func node() (root string, err error) {
	root, err = os.MkdirTemp("", "example")
	if err != nil {
		return "", err
	}
	for name, content := range map[string]string{
		"net.d/10-demo.conflist": `{"cniVersion": "1.0.0", "name": "demo", "plugins": [{"type": "fixed"}]}`,
		"bin/fixed": `#!/bin/sh
[ "$CNI_COMMAND" = ADD ] && echo '{"cniVersion": "1.0.0", "ips": [{"address": "192.0.2.5/24"}]}'
exit 0`,
	} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return "", err
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			return "", err
		}
	}
	return root, nil
}

// A pod joins the configured network and leaves it.
func Example() {
	root, err := node()
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(root)

	network, err := cni.New(cni.Config{
		ConfDir:  filepath.Join(root, "net.d"), // usually /etc/cni/net.d
		BinDirs:  []string{filepath.Join(root, "bin")},
		CacheDir: filepath.Join(root, "cache"),
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		log.Fatal(err)
	}
	defer network.Close()

	ctx := context.Background()
	pod := cni.Pod{ID: "p1", Name: "web", Namespace: "shop", UID: "u1", NetNS: "/proc/self/ns/net"}
	attachment, err := network.Plan()
	if err != nil {
		log.Fatal(err)
	}
	// The caller records the attachment here: Del needs it, also in the next daemon.
	result, err := network.Add(ctx, attachment, pod)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(attachment.Network, attachment.IfName, result.IPs)

	if err := network.Del(ctx, attachment, pod); err != nil {
		log.Fatal(err) // Del is repeated until it succeeds
	}
	// Output: demo eth0 [192.0.2.5]
}
