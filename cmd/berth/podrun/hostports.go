package podrun

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"berth/cmd/berth/client"
	"berth/internal/errdefs"
)

// takenPort matches the built-in network's error for a host port of another pod. The text around
// it lists every step of the request.
var takenPort = regexp.MustCompile(`(\w+) port (\d+) on \S+ belongs to the pod with address ([0-9A-Fa-f.:]*[0-9A-Fa-f])`)

// explainPorts replaces an error that host ports caused. It names the pods that use the ports.
func explainPorts(ctx context.Context, c *client.Client, err error) error {
	taken := takenPort.FindAllStringSubmatch(err.Error(), -1)
	if len(taken) == 0 {
		return err
	}
	var texts []string
	for _, match := range taken {
		owner := "the pod with address " + match[3]
		if title := podAt(ctx, c, match[3]); title != "" {
			owner = "pod " + title
		}
		text := fmt.Sprintf("host port %s/%s is used by %s", match[2], strings.ToLower(match[1]), owner)
		if !slices.Contains(texts, text) { // IPv4 and IPv6 have one entry each
			texts = append(texts, text)
		}
	}
	return errdefs.New(errdefs.Code(err), "%s", strings.Join(texts, ", "))
}

// podAt returns the name of the pod with an address, or "" if it is not found.
func podAt(ctx context.Context, c *client.Client, address string) string {
	pods, err := c.Pods(ctx)
	if err != nil {
		return ""
	}
	for _, pod := range pods {
		status, err := c.PodState(ctx, pod.GetId())
		if err == nil && slices.Contains(client.PodIPs(status), address) {
			return client.PodTitle(pod)
		}
	}
	return ""
}
