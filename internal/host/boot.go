package host

import (
	"fmt"
	"os"
	"strings"
)

// BootID returns the kernel's ID of the current boot, of random(4).
func BootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot ID: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}
