package podrun

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/cmd/berth/podyaml"
)

// Created is a pod that Run created, or the files that a killed Run left.
type Created struct {
	Manifest *corev1.Pod
	Sandbox  *runtimeapi.PodSandbox // nil if only the files exist

	uid string
}

// Find returns the pods with files below dir that match selects.
func Find(ctx context.Context, c *client.Client, dir string, match func(*corev1.Pod) bool) ([]Created, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list files of pods: %w", err)
	}
	pods, err := c.Pods(ctx)
	if err != nil {
		return nil, err
	}
	sandboxes := map[string]*runtimeapi.PodSandbox{}
	for _, pod := range pods {
		sandboxes[pod.GetMetadata().GetUid()] = pod
	}
	var found []Created
	for _, e := range entries {
		manifest, err := loadManifest(dir, e.Name())
		if err != nil {
			return nil, err
		}
		if manifest != nil && match(manifest) {
			found = append(found, Created{Manifest: manifest, Sandbox: sandboxes[e.Name()], uid: e.Name()})
		}
	}
	return found, nil
}

// Down stops and removes the pods with files below dir that match selects, and these files. A grace
// of at least 0 replaces the pods' own grace periods. It returns the names of the removed pods.
func Down(ctx context.Context, c *client.Client, dir string, match func(*corev1.Pod) bool,
	grace time.Duration) (names []string, err error) {
	found, err := Find(ctx, c, dir, match)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, f := range found {
		if err := f.remove(ctx, c, dir, grace); err != nil {
			errs = append(errs, fmt.Errorf("remove pod %s: %w", f.Manifest.Name, err))
			continue
		}
		names = append(names, f.Manifest.Namespace+"/"+f.Manifest.Name)
	}
	return names, errors.Join(errs...)
}

func (f *Created) remove(ctx context.Context, c *client.Client, dir string, grace time.Duration) error {
	if f.Sandbox != nil {
		if err := Stop(ctx, c, f.Sandbox, dir, grace); err != nil {
			return err
		}
		if err := c.RemovePod(ctx, f.Sandbox.GetId()); err != nil {
			return err
		}
	}
	return RemoveFiles(dir, f.uid)
}

// OfWorkload returns a function that selects the pods of a workload.
func OfWorkload(w podyaml.Workload) func(*corev1.Pod) bool {
	return func(pod *corev1.Pod) bool {
		if pod.Namespace != w.Pod.Namespace {
			return false
		}
		if w.Kind == "Pod" {
			return pod.Name == w.Name
		}
		return ownedBy(pod, w.Kind, w.Name)
	}
}

// Named returns a function that selects the pods with a name, or those of the workload with that
// name. The name can have a kind or a namespace before it: deployment/web, shop/web.
func Named(name string) func(*corev1.Pod) bool {
	before, after, split := strings.Cut(name, "/")
	return func(pod *corev1.Pod) bool {
		switch {
		case !split:
			return pod.Name == name || ownedBy(pod, "", name)
		case pod.Namespace == before && (pod.Name == after || ownedBy(pod, "", after)):
			return true
		}
		return ownedBy(pod, before, after) || (strings.EqualFold(before, "Pod") && pod.Name == after)
	}
}

// ownedBy reports whether a workload created the pod. An empty kind means any.
func ownedBy(pod *corev1.Pod, kind, name string) bool {
	for _, owner := range pod.OwnerReferences {
		if owner.Name == name && (kind == "" || strings.EqualFold(owner.Kind, kind)) {
			return true
		}
	}
	return false
}

// claimDir returns the directory of a claim's data. Claims outlive their pods.
func claimDir(dir, namespace, name string) string {
	return filepath.Join(dir, "claims", namespace, name)
}

// RemoveClaims removes the data of the manifest's claims below dir.
func RemoveClaims(dir string, m *podyaml.Manifest) error {
	var errs []error
	for _, claim := range m.Objects.Claims() {
		errs = append(errs, removeTree(claimDir(dir, claim[0], claim[1])))
		_ = os.Remove(claimDir(dir, claim[0], "")) // fails if the namespace has other claims
		_ = os.Remove(filepath.Join(dir, "claims"))
	}
	return errors.Join(errs...)
}
