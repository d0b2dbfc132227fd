// Package powercut cuts the power of a node at random moments and checks how berth recovers from
// the remaining disk.
//
// A daemon works on a filesystem on a logging disk (blocklog): images are pulled and removed, pods
// come and go. From the log the tests derive any number of disks, each after a power cut at one
// position. Each is mounted, a daemon is started on it as after a boot, and its images, pods and
// addresses are checked.
//
// The default is a few power cuts; BERTH_TORTURE=1 makes 200 on each filesystem, and BERTH_CUTS
// sets the number. Random choices come from a seed, which is printed. BERTH_SEED repeats it, as far
// as the kernel's own timing allows.
package powercut
