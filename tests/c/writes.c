/* So many bytes, one by one, to /dev/null: what `write` costs. */
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int fd = open("/dev/null", O_WRONLY);
    for (int i = argc == 2 ? atoi(argv[1]) : 0; i > 0; i--)
        if (write(fd, "", 1) != 1)
            return 1;
    return 0;
}
